"""The ops a decoder is made of: one signature each (`ops.py`), implemented by several backends. Torch only."""
