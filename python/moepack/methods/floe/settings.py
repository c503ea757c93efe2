"""The settings of the method `floe`."""

from dataclasses import dataclass
from typing import ClassVar

from moepack.methods import shared
from moepack.methods.settings import Settings, setting
from moepack.solvers.widths import BITS, GROUP_SIZES

__all__ = ["COARSE_BITS", "PAPER", "FloeSettings"]

COARSE_BITS = 2.0
"""Default bits per weight of coarse gate and down projections."""

PAPER = {"up_bits": 2, "group_size": 64, "solver": "lsq"}
"""Settings that only the paper's form has, and their defaults."""


@dataclass
class FloeSettings(Settings):
    """The settings. None means the default of the chosen form."""

    calibration: str = shared.calibration(note="by default built-in")
    sparsity: float = setting(
        0.8,
        help="Fraction of channels not refined, or skipped (--paper-form), per token",
        users="expert",
        minimum=0,
        maximum=1,
    )
    bits: int | None = setting(
        None,
        help="Bits of record values",
        shown="4, 8 with --paper-form",
        users="expert",
        choices=(4, 8, 16),
    )
    coarse_bits: float | None = setting(
        None, help="Bits per weight of coarse gate and down, 2 more for up", shown="2", users="expert"
    )
    paper_form: bool = setting(
        False,
        help="The paper's form: low-bit up projections select channels, and the others are skipped. Faster on CPUs, "
        "with a much larger loss.",
        option="--paper-form",
        users="expert",
    )
    up_bits: int | None = setting(
        None,
        help="With --paper-form: bits of the selecting up projections",
        shown="2",
        users="expert",
        choices=BITS,
    )
    group_size: int | None = setting(
        None, help="With --paper-form: columns per scale", shown="64", users="expert", choices=GROUP_SIZES
    )
    solver: str | None = setting(
        None, help="With --paper-form: solver of up projections", shown="lsq", users="expert", choices=("lsq", "hqq")
    )
    dense_layers: int | None = setting(
        None,
        help="Number of first layers that refine or compute all channels",
        shown="0, 1 with --paper-form",
        users="expert",
        minimum=0,
    )
    samples: int = shared.samples(64)
    sequence_length: int = shared.sequence_length()
    device: str = shared.device()
    name: ClassVar[str] = "floe"
    summary: ClassVar[str] = "coarse copies compute and select the channels that 4-bit residuals refine; needs a text"
    implementation: ClassVar[str] = "moepack.methods.floe.method:Floe"
    seconds: ClassVar[float | None] = 150
