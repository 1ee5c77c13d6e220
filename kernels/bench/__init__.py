"""`python -m kernels.bench`, or `pdserve bench kernels`: compares each op with the reference and the limits."""
