"""The settings of the method `auto`."""

from dataclasses import dataclass
from typing import ClassVar

from moepack.methods import shared
from moepack.methods.settings import Settings, setting

__all__ = ["AutoSettings"]


@dataclass
class AutoSettings(Settings):
    """The settings. At most one of the three sizes may be given."""

    size: str | int | None = setting(
        None, help="Total size of the weight files, for example 9GB, 7.5GiB or 5e9.", users="basic", recorded=False
    )
    bits_per_weight: float | None = setting(
        None, help="Average bits per weight over the whole model, for example 2.5.", users="basic", recorded=False
    )
    ratio: float | None = setting(
        None, help="Size relative to the checkpoint, for example 0.25.", users="basic", recorded=False
    )
    calibration: str | None = shared.calibration(
        note="by default `built-in`, or `none` if the model cannot run on it or the gradients of its largest layer do "
        "not fit in memory"
    )
    prefer: str = setting(
        "balance",
        help="balance (default): least loss at 0.7 of the speed of speed; quality: least loss; or speed.",
        shown="",
        users="basic",
        choices=("balance", "quality", "speed"),
    )
    target: str | None = setting(
        None,
        help="Machine that will run the model: avx2-8core, avx512, h100, or a file of `moepack doctor --json`. "
        "Default: this one.",
        users="basic",
        recorded=False,
    )
    codes: str = shared.codes()
    samples: int = shared.samples()
    sequence_length: int = shared.sequence_length()
    group: int = shared.group()
    minimum_tokens: int = shared.minimum_tokens()
    device: str = shared.device()
    seed: int = shared.span_seed()
    name: ClassVar[str] = "auto"
    summary: ClassVar[str] = "best quality at a given size (the default); better with a calibration text"
    implementation: ClassVar[str] = "moepack.methods.auto.method:Auto"
    seconds: ClassVar[float | None] = 24
