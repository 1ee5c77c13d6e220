"""Tests of `pdserve plan`."""
