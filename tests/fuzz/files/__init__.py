"""Damaged and forged files of models: each is either read or refused with one line."""
