"""Triton kernels, one op a file, a torch reference beside each: `hdet_scale.kernels`."""
