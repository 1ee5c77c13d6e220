"""Generated from proto/pdserve/v1 by `make proto`; never edited."""
