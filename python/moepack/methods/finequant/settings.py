"""The settings of the method `finequant`."""

from dataclasses import dataclass
from typing import ClassVar

from moepack.methods import shared
from moepack.methods.settings import Settings, setting
from moepack.solvers.widths import BITS, GROUP_SIZES

__all__ = ["ADAPTIVE", "ALPHA", "BOOK_BITS", "BUDGET", "CODEBOOK", "GROUP", "INTEGERS", "ROW", "FineQuantSettings"]

ROW, ADAPTIVE, BUDGET = "row", "adaptive", "budget"

INTEGERS, CODEBOOK = "integers", "codebook"

BOOK_BITS = (2, 3, 4)
"""Bits per code of a codebook."""

GROUP = 64
"""Default group size."""

ALPHA = 0.35
"""Default threshold of the adaptive rule."""


@dataclass
class FineQuantSettings(Settings):
    """The settings.

    Group sizes other than a number are "row", "adaptive" (the paper's rule), or "budget" (the best sizes within
    `bits_per_weight`).

    The adaptive rule halves groups while some range falls below the fraction `alpha` of the parent's. The paper
    publishes no value. Ranges of Gaussian weights fall to 0.4 at 128 columns and to 0.3 at 64.
    """

    bits: int = setting(4, help="Bits per code", users="expert", choices=BITS)
    group_size: int | str = setting(
        GROUP, help="Columns per scale", users="expert", choices=(*GROUP_SIZES, ROW, ADAPTIVE, BUDGET)
    )
    bits_per_weight: float | None = setting(
        None,
        help="Average bits per packed weight, only if the group size is `budget`. Default: as many as groups of 64 "
        "take.",
        users="basic",
        above=0,
        maximum=32,
    )
    dense_bits: str | int | None = setting(
        None,
        help="Also pack attention, shared experts and dense layers. Bits for all of them, such as 8, or for each role, "
        "such as mlp=4,shared=8.",
        users="expert",
    )
    alpha: float | None = setting(
        None,
        help="Threshold of `--group-size adaptive`",
        shown=str(ALPHA),
        users="expert",
        above=0,
        below=1,
    )
    symmetric: bool = setting(
        True,
        help="One scale per group (symmetric), or a scale and an offset (asymmetric).",
        option="--symmetric/--asymmetric",
        users="expert",
    )
    grid: str = setting(
        INTEGERS,
        help="`integers` (default), or `codebook`: 4, 8 or 16 values per row of an expert, fitted on the calibration "
        "text.",
        shown="",
        users="expert",
        choices=(INTEGERS, CODEBOOK),
    )
    calibration: str | None = shared.default_calibration()
    samples: int = shared.samples()
    sequence_length: int = shared.sequence_length()
    group: int = setting(16, help="Experts that are quantized together", minimum=1)
    minimum_tokens: int = setting(
        64, help="Experts with fewer calibration tokens are listed in the report's notes", recorded=False
    )
    device: str = shared.device()
    seed: int = setting(0, help="Seed of the span corruption of encoder-decoder models")
    name: ClassVar[str] = "finequant"
    summary: ClassVar[str] = "group-wise integers of 8, 4, 3 or 2 bits, calibrated on a text by default"
    implementation: ClassVar[str] = "moepack.methods.finequant.method:FineQuant"
    seconds: ClassVar[float | None] = 35
