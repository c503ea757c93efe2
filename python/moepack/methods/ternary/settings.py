"""The settings of the method `ternary`."""

from dataclasses import dataclass
from typing import ClassVar

from moepack.methods.settings import Settings, setting

__all__ = ["TernarySettings"]


@dataclass
class TernarySettings(Settings):
    """The settings."""

    code: str = setting("fsv8", help="Entropy code of ternary experts", users="expert", choices=("fsv8", "dict16"))
    name: ClassVar[str] = "ternary"
    summary: ClassVar[str] = (
        "three values per row at 0.6 to 1.3 bits, uncalibrated: smallest, with a large quality loss"
    )
    implementation: ClassVar[str] = "moepack.methods.ternary.method:Ternary"
    seconds: ClassVar[float | None] = 15
