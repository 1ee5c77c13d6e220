"""The ops in C++: `src/` holds them, the install builds them, `native.py` loads them."""
