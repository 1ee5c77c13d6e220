"""Facts that processes report about themselves for `pdserve doctor`."""
