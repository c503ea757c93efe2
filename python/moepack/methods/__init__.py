"""Compression methods, one room each. `create` finds one by name."""

from collections.abc import Callable
from typing import Any

from moepack.methods.base import (
    CalibratedDenseMethod,
    CalibratedMethod,
    DenseMethod,
    Method,
    PackedTensor,
    PlannedMethod,
    Shape,
    Weights,
)
from moepack.methods.codequant import CodeQuant
from moepack.methods.finequant import FineQuant
from moepack.methods.qmoe import Qmoe
from moepack.methods.ternary import Ternary

METHODS: dict[str, Callable[..., Method]] = {
    "codequant": CodeQuant,
    "finequant": FineQuant,
    "qmoe": Qmoe,
    "ternary": Ternary,
}
"""The methods by name; each is called with its settings as keywords."""

__all__ = [
    "METHODS",
    "CalibratedDenseMethod",
    "CalibratedMethod",
    "DenseMethod",
    "Method",
    "PackedTensor",
    "PlannedMethod",
    "Shape",
    "Weights",
    "create",
]


def create(name: str, **settings: Any) -> Method:
    """Return the method `name` with `settings`.

    Raises:
        ValueError: there is no such method, or it has no such setting.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method '{name}'; there is: {', '.join(sorted(METHODS))}")
    try:
        return METHODS[name](**settings)
    except TypeError as error:
        raise ValueError(f"method '{name}': {error}") from error
