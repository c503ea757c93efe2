"""Which kernels multiply which format. A family is a module here with an object `KERNELS` (`matrix.Kernels`)."""

from functools import cache
from importlib import import_module

from moepack.errors import LoadError
from moepack.runtime.backends.gpu.matrix import Kernels

__all__ = ["FAMILIES", "kernels_of", "kernels_of_both"]

FAMILIES = {
    "groupwise": "groupwise",
    "compensated": "compensated",
    "ternary": "ternary",
    "codebook": "codebook",
}
"""The module of each kind of packed tensor. `coded-groupwise` becomes `groupwise` when it is uploaded."""


_ALSO = {("compensated", "groupwise")}
"""Families that take another's kind, too: where a compensator has no rank, its tensor is plain integers."""


@cache
def kernels_of(kind: str) -> Kernels:
    """Return the kernels of a kind.

    Raises:
        LoadError: there are none: the format is written in Python, or runs on the CPU alone.
    """
    if kind not in FAMILIES:
        raise LoadError(f"tensors of the kind '{kind}' run on the CPU, there are no GPU kernels for them")
    kernels: Kernels = import_module(f"{__package__}.{FAMILIES[kind]}").KERNELS
    return kernels


@cache
def kernels_of_both(kind: str, other: str) -> Kernels | None:
    """Return the kernels that take two kinds in one call, if there are any; errors as for `kernels_of`."""
    for family, second in ((kind, other), (other, kind)):
        if FAMILIES[family] == FAMILIES[second] or (FAMILIES[family], second) in _ALSO:
            return kernels_of(family)
    return None
