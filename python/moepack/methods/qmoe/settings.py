"""The settings of the method `qmoe`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moepack.methods import shared
from moepack.methods.settings import Settings, setting
from moepack.solvers.widths import GROUP_SIZES

__all__ = ["LEAST_BITS", "MOST_BITS", "QmoeSettings"]

LEAST_BITS, MOST_BITS = 0.4, 2.0
"""Range of the rate. Below, narrow rows hold little but metadata; above, no row has more to code."""


@dataclass
class QmoeSettings(Settings):
    """The settings."""

    calibration: str = shared.calibration(note="by default `built-in`")
    samples: int = shared.samples()
    sequence_length: int = shared.sequence_length()
    bits: Literal["ternary", "2"] = setting(
        "ternary",
        help="`ternary` (default; three values per row) or `2` (group-wise integers of two bits).",
        shown="",
        users="expert",
    )
    group_size: int = setting(64, help="Columns per scale", users="expert", choices=GROUP_SIZES)
    dense_bits: str | int | None = setting(
        None,
        help="Also pack attention, shared experts and dense layers. Bits for all of them, such as 8, or for each role, "
        "such as mlp=4,shared=8.",
        users="expert",
    )
    bits_per_weight: float | None = setting(
        None,
        help="Average bits per weight of ternary experts. Default: as many as the ternary grid of the QMoE "
        "paper takes.",
        users="basic",
        minimum=LEAST_BITS,
        maximum=MOST_BITS,
    )
    damping: float = setting(0.1, help="Damping of the Hessian, relative to the mean of its diagonal")
    # See `moepack.solvers.drift`. Values other than 0 run the original model beside the compressed one, which doubles
    # the time outside the solver.
    drift: float = setting(
        0.5,
        help="Share of the error accumulated in earlier layers that is corrected by moving the weights",
        minimum=0,
        maximum=1,
    )
    weigh_tokens: bool = setting(
        True, help="Weight each token in the Hessians by its effect on the block's output; a rate always does"
    )
    refit: bool = setting(True, help="With two bits, refit scales and offsets to GPTQ's codes")
    act_order: bool = setting(False, help="Process columns by decreasing diagonal")
    # "rtn" is a baseline without calibration: the grid of minimum and maximum.
    solver: Literal["gptq", "rtn"] = setting("gptq", help="Solver of the experts", users="expert")
    # Two bits lose so little energy that the factors would overfit the calibration set.
    match_energy: bool | None = setting(
        None, help="Restore the output energy of each row by a factor on its levels; by default with ternary rows"
    )
    activations: Literal["compressed", "original"] = setting(
        "compressed", help="Which activations enter the next block"
    )
    # The original router costs a second stream and was no better on the models measured (docs/methods/qmoe.md).
    routing: Literal["original", "compressed"] = setting(
        "compressed", help="Whose router assigns tokens for the Hessians"
    )
    premask: bool = setting(True, help="Exclude positions of special tokens (span corruption)")
    group: int = shared.group()
    buffer: Literal["memory", "device"] = setting(
        "memory", help="Where the hidden states of the calibration set are kept", recorded=False
    )
    token_cap: float = setting(4.0, help="Maximum number of tokens held per expert, as a multiple of the mean")
    minimum_tokens: int = shared.minimum_tokens()
    device: str = shared.device()
    seed: int = setting(0, help="Seed of the span corruption")
    name: ClassVar[str] = "qmoe"
    summary: ClassVar[str] = "three values per row at 0.4 to 2 bits, or 2-bit integers; needs a calibration text"
    implementation: ClassVar[str] = "moepack.methods.qmoe.method:Qmoe"
    seconds: ClassVar[float | None] = 500
