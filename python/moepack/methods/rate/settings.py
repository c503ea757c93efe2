"""The settings of the method `rate`."""

from dataclasses import dataclass
from typing import ClassVar

from moepack.methods import shared
from moepack.methods.settings import Settings, setting

__all__ = ["LEAST_BITS", "MOST_BITS", "RateSettings"]

LEAST_BITS, MOST_BITS = 0.4, 8.0
"""Range of the rate. Above it, more integers are exceptions than the tables hold with three low bits."""


@dataclass
class RateSettings(Settings):
    """The settings."""

    bits_per_weight: float = setting(
        help="Average bits per packed weight", users="basic", minimum=LEAST_BITS, maximum=MOST_BITS
    )
    roles: str = setting(
        "all",
        help="Layers to pack besides experts: `all` (default), `none`, or some of embedding, attention, shared, mlp, "
        "head, separated by commas. A head that is tied to the embedding is packed with it.",
        shown="",
        users="expert",
    )
    codes: str = shared.codes()
    calibration: str | None = shared.default_calibration()
    samples: int = shared.samples()
    sequence_length: int = shared.sequence_length()
    group: int = shared.group()
    minimum_tokens: int = shared.minimum_tokens()
    device: str = shared.device()
    seed: int = shared.span_seed()
    name: ClassVar[str] = "rate"
    summary: ClassVar[str] = (
        "entropy-coded integers at any average from 0.4 to 8 bits per weight, for experts and all linear layers; "
        "calibrated on a text by default"
    )
    implementation: ClassVar[str] = "moepack.methods.rate.method:Rate"
    seconds: ClassVar[float | None] = 24
