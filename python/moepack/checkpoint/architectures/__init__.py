"""Descriptions of architectures, one file per architecture. New files in this package are discovered automatically.

They are used by `checkpoint.description` (to identify experts, linear layers and routers), the budget of group sizes
(experts per token), rotations (readers and writers of the residual stream) and export (checkpoint names).
"""

from importlib import import_module
from pkgutil import iter_modules

from moepack.checkpoint.architectures.architecture import (
    ARCHITECTURES,
    EMBEDDING,
    ROLES,
    Architecture,
    Layout,
    Linears,
    register,
)
from moepack.checkpoint.architectures.standard import STANDARD

__all__ = [
    "ARCHITECTURES",
    "EMBEDDING",
    "ROLES",
    "STANDARD",
    "Architecture",
    "Layout",
    "Linears",
    "described",
    "register",
]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")


def described(model_type: str) -> Architecture:
    """Return the description of an architecture, or `STANDARD` if it has none."""
    return ARCHITECTURES.get(model_type, STANDARD)
