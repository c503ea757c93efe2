"""The settings of the method `milo`."""

from dataclasses import dataclass
from typing import ClassVar

from moepack.methods import shared
from moepack.methods.settings import Settings, setting
from moepack.solvers.widths import BITS, GROUP_SIZES

__all__ = ["DEFAULT_RANK", "SAMPLES", "SEQUENCE_LENGTH", "MiloSettings"]

DEFAULT_RANK = "budget:5"

SAMPLES, SEQUENCE_LENGTH = 128, 512
"""Default number of samples, and tokens per sample."""


@dataclass
class MiloSettings(Settings):
    """The settings.

    Without `symmetric`, a budget decides per tensor, and without a budget all tensors have offsets. The text of
    `calibration` serves to count how often experts are chosen; without one, all experts count equally.
    """

    bits: int = setting(3, help="Bits per code", users="expert", choices=BITS)
    group_size: int = setting(64, help="Columns per scale", users="expert", choices=GROUP_SIZES)
    symmetric: bool | None = setting(
        None,
        help="One scale per group (symmetric), or a scale and an offset (asymmetric).",
        option="--symmetric/--asymmetric",
        users="expert",
    )
    solver: str = setting(
        "lsq", help="How scales and codes of a group are found", users="expert", choices=("lsq", "hqq", "rtn")
    )
    rank: str | None = setting(
        None,
        help="Ranks of the low-rank corrections, such as dense:512+kurtosis:16",
        shown=DEFAULT_RANK,
        users="expert",
    )
    rank_bits: int = setting(3, help="Bits of the low-rank corrections", users="expert", choices=(3, 8, 16))
    memory_budget: int | None = setting(
        None,
        help="Maximum total size of OUT's safetensors files in bytes; the ranks are chosen to fit. Replaces --rank.",
        users="expert",
        minimum=1,
    )
    refine: bool = setting(
        True,
        help="Quantize the low-rank corrections in each round of the optimization (default), or once after the last "
        "round.",
        option="--refine/--no-refine",
        users="expert",
    )
    rounds: int = setting(
        20,
        help="Maximum number of rounds of the optimization, which alternates between codes and corrections",
        minimum=1,
    )
    calibration: str | None = shared.calibration(None)
    samples: int = shared.samples(SAMPLES)
    sequence_length: int = shared.sequence_length(SEQUENCE_LENGTH)
    dense_weight: float = setting(1.0, help="Weight of a dense layer's error in a budget")
    device: str = shared.device()
    name: ClassVar[str] = "milo"
    summary: ClassVar[str] = (
        "group-wise integers of 3 bits (or 2, 4, 8) with quantized low-rank corrections; needs no calibration"
    )
    implementation: ClassVar[str] = "moepack.methods.milo.method:Milo"
    seconds: ClassVar[float | None] = 600
