"""The ops a decoder is made of: one signature each (`ops.py`), with siblings that implement it. Torch only."""
