"""Packed weights on NVIDIA GPUs: kernels of the folder `cuda`, compiled by NVRTC and launched through CuPy."""
