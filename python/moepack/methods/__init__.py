"""Compression methods, one room each. `create` instantiates a method by name."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from moepack.methods.auto import Auto
from moepack.methods.base import Expected, LayerPlan, Method, PackedTensor, Shape, Solution, Stage, Weights
from moepack.methods.codequant import CodeQuant
from moepack.methods.finequant import FineQuant
from moepack.methods.floe import Floe
from moepack.methods.milo import Milo
from moepack.methods.qmoe import Qmoe
from moepack.methods.rate import Rate
from moepack.methods.ternary import Ternary

METHODS: dict[str, Callable[..., Method]] = {
    "auto": Auto,
    "codequant": CodeQuant,
    "finequant": FineQuant,
    "floe": Floe,
    "milo": Milo,
    "qmoe": Qmoe,
    "rate": Rate,
    "ternary": Ternary,
}
"""The methods by name; each takes its settings as keyword arguments."""

__all__ = [
    "METHODS",
    "Auto",
    "CodeQuant",
    "Expected",
    "FineQuant",
    "LayerPlan",
    "Method",
    "Milo",
    "PackedTensor",
    "Qmoe",
    "Rate",
    "Shape",
    "Solution",
    "Stage",
    "Ternary",
    "Weights",
    "create",
]


def create(name: str, **settings: Any) -> Method:
    """Return the method `name` with `settings`.

    Raises:
        ValueError: the method or a setting is unknown, or a required setting is missing.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method '{name}'; available: {', '.join(sorted(METHODS))}")
    known = signature(METHODS[name]).parameters
    if unknown := [setting for setting in settings if setting not in known]:
        raise ValueError(f"the method {name} has no setting {', '.join(unknown)}; available: {', '.join(known)}")
    if missing := [key for key, of in known.items() if of.default is of.empty and key not in settings]:
        raise ValueError(f"the method {name} requires {', '.join(missing)}")
    try:
        return METHODS[name](**settings)
    except TypeError as error:
        raise ValueError(f"method '{name}': {error}") from error
