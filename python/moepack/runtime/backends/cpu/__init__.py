"""Everything that the core and its NumPy arrays need: products (`backend`), a decoder's views (`decoding`)."""

from moepack.runtime.backends.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
