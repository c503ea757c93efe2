"""Maps formats to kernels. A family is a module in this package with an object `KERNELS` (`matrix.Kernels`)."""

from functools import cache
from importlib import import_module

from moepack.backends.gpu.matrix import Kernels
from moepack.errors import LoadError

__all__ = ["FAMILIES", "kernels_of"]

FAMILIES = {
    "groupwise": "groupwise",
    "compensated": "groupwise",
    "ternary": "ternary",
    "codebook": "codebook",
    "coded": "coded",
    "channels": "channels",
}
"""The module for each kind of packed tensor; `channels` is not a matrix."""


@cache
def kernels_of(kind: str) -> Kernels:
    """Return the kernels of a kind.

    Raises:
        LoadError: there are none: the format is written in Python, or only runs on the CPU.
    """
    if kind not in FAMILIES:
        raise LoadError(f"tensors of the kind '{kind}' run only on the CPU, because there are no GPU kernels for them")
    kernels: Kernels = import_module(f"{__package__}.{FAMILIES[kind]}").KERNELS
    return kernels
