"""The described architectures, by transformers' model type."""

from collections.abc import Mapping
from types import MappingProxyType

from moepack.checkpoint.architectures.architecture import Architecture

__all__ = ["ARCHITECTURES", "register"]

_known: dict[str, Architecture] = {}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(_known)


def register(architecture: Architecture) -> None:
    """Let moepack know an architecture; each file of this package calls it once.

    Raises:
        ValueError: another one has its model type.
    """
    if _known.setdefault(architecture.model_type, architecture) is not architecture:
        raise ValueError(f"the architecture '{architecture.model_type}' is already registered")
