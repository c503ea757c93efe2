"""Chooses settings with which each method meets a size, or comes as close below it as it can."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moepack.methods import METHODS, Method, method_class
from moepack.methods.fitting import Fitted, Wanted

__all__ = ["Wanted", "fitted", "fittings"]


def fittings() -> Mapping[str, Callable[[Wanted], Method]]:
    """Return the methods that can be compared, with their variants, by name.

    Each makes a method that meets a size, and raises ValueError if it cannot.
    """
    comparable = (made for name in METHODS if issubclass(made := method_class(name), Fitted))
    return {name: fit for made in comparable for name, fit in made.fittings().items()}


def fitted(name: str, wanted: Wanted) -> Method:
    """Return the method `name` with settings that meet a size.

    Raises:
        ValueError: the method cannot reach that size, or is unknown.
    """
    known = fittings()
    if name not in known:
        raise ValueError(f"cannot compare '{name}'; available: {', '.join(known)}")
    return known[name](wanted)
