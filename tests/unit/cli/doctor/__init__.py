"""Tests of `pdserve doctor`."""
