"""Compression methods, one room each. `create` instantiates a method by name.

A method is declared once, by the dataclass in its room's `settings.py`. Importing this package imports the
declarations; the methods themselves are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from moepack.lazy import lazy
from moepack.methods.auto.settings import AutoSettings
from moepack.methods.codequant.settings import CodeQuantSettings
from moepack.methods.finequant.settings import FineQuantSettings
from moepack.methods.floe.settings import FloeSettings
from moepack.methods.milo.settings import MiloSettings
from moepack.methods.overrides import split_bits
from moepack.methods.qmoe.settings import QmoeSettings
from moepack.methods.rate.settings import RateSettings
from moepack.methods.settings import REQUIRED, Settings, settings_of

if TYPE_CHECKING:
    from moepack.methods.auto.method import Auto
    from moepack.methods.base import (
        Expected,
        LayerPlan,
        Method,
        MethodPlan,
        PackedBytes,
        Packer,
        Shape,
        SimpleMethod,
        Solution,
        Stage,
        Weights,
    )
    from moepack.methods.codequant.method import CodeQuant
    from moepack.methods.finequant.method import FineQuant
    from moepack.methods.floe.method import Floe
    from moepack.methods.milo.method import Milo
    from moepack.methods.mixins import Calibrates, Goal, MeetsSize, PacksLinears, Rearranges, Rewrites
    from moepack.methods.qmoe.method import Qmoe
    from moepack.methods.rate.method import Rate

METHODS: dict[str, type[Settings]] = {
    each.name: each
    for each in (
        AutoSettings,
        FineQuantSettings,
        RateSettings,
        FloeSettings,
        MiloSettings,
        CodeQuantSettings,
        QmoeSettings,
    )
}
"""The declarations of all methods by name, in the order of the help."""

__all__ = [
    "METHODS",
    "Auto",
    "Calibrates",
    "CodeQuant",
    "Expected",
    "FineQuant",
    "Floe",
    "Goal",
    "LayerPlan",
    "MeetsSize",
    "Method",
    "MethodPlan",
    "Milo",
    "PackedBytes",
    "Packer",
    "PacksLinears",
    "Qmoe",
    "Rate",
    "Rearranges",
    "Rewrites",
    "Shape",
    "SimpleMethod",
    "Solution",
    "Stage",
    "Weights",
    "create",
    "method_class",
    "register",
]

_BASE = (
    *("Expected", "LayerPlan", "Method", "MethodPlan", "PackedBytes"),
    *("Packer", "Shape", "SimpleMethod", "Solution", "Stage", "Weights"),
)

_MIXINS = ("Calibrates", "Goal", "MeetsSize", "PacksLinears", "Rearranges", "Rewrites")

__getattr__ = lazy(
    __name__,
    dict.fromkeys(_BASE, "moepack.methods.base")
    | dict.fromkeys(_MIXINS, "moepack.methods.mixins")
    | {each.implementation.partition(":")[2]: each.implementation.partition(":")[0] for each in METHODS.values()},
)


def register(declaration: type[Settings]) -> None:
    """Add a method of another package: its class, or a declaration that names its class as `implementation`.

    Raises:
        ValueError: there is a method of this name.
    """
    if declaration.name in METHODS:
        raise ValueError(f"there is already a method '{declaration.name}'")
    METHODS[declaration.name] = declaration


def method_class(name: str) -> "type[Method]":
    """Return the class of the method `name`.

    Raises:
        ValueError: the method is unknown.
    """
    if name not in METHODS:
        raise ValueError(f"unknown method '{name}'; available: {', '.join(sorted(METHODS))}")
    module, _, attribute = METHODS[name].implementation.partition(":")
    found: Any = getattr(import_module(module), attribute) if module else METHODS[name]
    return found  # type: ignore[no-any-return]


def create(name: str, **settings: Any) -> "Method":
    """Return the method `name` with `settings`.

    The setting `bits` may give bits by name for any method (`moepack.methods.overrides.split_bits`).

    Raises:
        OverrideError: bits by name are malformed.
        ValueError: the method or a setting is unknown, a required setting is missing, or a value is not allowed.
    """
    made = method_class(name)
    own, overrides = split_bits(settings.get("bits"))
    if overrides:
        settings = {key: value for key, value in settings.items() if key != "bits"} | ({"bits": own} if own else {})
    known = {each.name: each for each in settings_of(METHODS[name])}
    if unknown := [setting for setting in settings if setting not in known]:
        raise ValueError(f"the method {name} has no setting {', '.join(unknown)}; available: {', '.join(known)}")
    if missing := [key for key, each in known.items() if each.default is REQUIRED and key not in settings]:
        raise ValueError(f"the method {name} requires {', '.join(missing)}")
    try:
        method = made(**settings)
    except TypeError as error:
        raise ValueError(f"method '{name}': {error}") from error
    if overrides:
        object.__setattr__(method, "overrides", overrides)  # the method may be a frozen dataclass
    return method
