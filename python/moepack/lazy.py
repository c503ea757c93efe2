"""Names that a package imports on first use, so that importing the package stays fast."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the module-level `__getattr__` (PEP 562) of a package that imports names on first use.

    Args:
        package: `__name__` of the package.
        names: maps each exported name to the module that defines it.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        value = getattr(import_module(names[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
