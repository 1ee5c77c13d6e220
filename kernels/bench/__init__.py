"""`python -m kernels.bench`, or `pdserve bench kernels`: each op against the reference and the machine's limits."""
