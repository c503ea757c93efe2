"""The settings of the method `auto`."""

from dataclasses import dataclass
from typing import ClassVar

from moepack.methods import shared
from moepack.methods.settings import Settings, setting
from moepack.textfile import BUILT_IN

__all__ = ["NO_TEXT", "AutoSettings"]

NO_TEXT = "none"
"""Value of `calibration` that disables it."""


@dataclass
class AutoSettings(Settings):
    """The settings. At most one of the three sizes may be given."""

    size: str | int | None = setting(
        None, help="Total size of the weight files: 9GB, 7.5GiB, 5e9.", users="basic", recorded=False
    )
    bits_per_weight: float | None = setting(
        None, help="Average bits per weight, counting all weights: 2.5.", users="basic", recorded=False
    )
    ratio: float | None = setting(None, help="Size relative to the checkpoint: 0.25.", users="basic", recorded=False)
    calibration: str | None = shared.calibration(
        BUILT_IN,
        shown="",
        note="by default a built-in text, if the model's largest layer fits in memory with gradients; none disables it",
    )
    prefer: str = setting(
        "quality",
        help="quality (default), or speed: formats that are fast on this machine, less accurate.",
        shown="",
        users="basic",
        choices=("quality", "speed"),
    )
    codes: str = setting(
        "dependent",
        help="dependent (default): less error, at most a sixth slower; or plain.",
        shown="",
        users="expert",
        choices=("dependent", "plain"),
    )
    samples: int = shared.samples()
    sequence_length: int = shared.sequence_length()
    group: int = setting(16, help="Experts solved together", minimum=1)
    minimum_tokens: int = setting(64, help="The notes name experts with fewer tokens", recorded=False)
    device: str = shared.device()
    seed: int = setting(0, help="Seed of the span corruption of encoder-decoder models")
    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "best quality at a given size (the default); better with a calibration text"
    implementation: ClassVar[str] = "moepack.methods.auto.method:Auto"
    seconds: ClassVar[float | None] = 90
