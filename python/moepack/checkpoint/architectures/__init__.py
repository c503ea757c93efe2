"""One description of each architecture, one file each. A new file in this package is found by itself.

Read by `checkpoint.description` (which tensors are experts, linear layers, routers), the budget of group sizes (experts
a token visits), rotations (who reads and writes the residual stream) and export (the hub's names).
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
    """The description of an architecture; `STANDARD` where it has none of its own."""
    return ARCHITECTURES.get(model_type, STANDARD)
