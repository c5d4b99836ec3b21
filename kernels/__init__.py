"""Triton kernels, one op a file, a torch reference beside each. Installed as `hdet_scale.kernels`."""
