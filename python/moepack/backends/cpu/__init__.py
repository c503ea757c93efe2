"""Code that uses the core and its NumPy arrays: products (`backend`) and array views for the decoder (`views`)."""

from moepack.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
