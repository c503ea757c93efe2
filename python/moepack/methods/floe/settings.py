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

    calibration: str = shared.calibration(note="by default `built-in`")
    sparsity: float = setting(
        0.8,
        help="Fraction of channels per token that keep their coarse weights, or, with --paper-form, are skipped",
        users="expert",
        minimum=0,
        maximum=1,
    )
    bits: int | None = setting(
        None,
        help="Bits per channel weight that is read on demand",
        shown="4, or 8 with --paper-form",
        users="expert",
        choices=(4, 8, 16),
    )
    coarse_bits: float | None = setting(
        None,
        help="Bits per weight of the coarse gate and down projections; up projections take 2 bits more",
        shown="2",
        users="expert",
    )
    paper_form: bool = setting(
        False,
        help="The form of the FloE paper: low-bit up projections select channels, and all others are skipped. "
        "Faster on CPUs, with a much larger loss.",
        option="--paper-form",
        users="expert",
    )
    up_bits: int | None = setting(
        None,
        help="With --paper-form: bits of the up projections, which select the channels",
        shown="2",
        users="expert",
        choices=BITS,
    )
    group_size: int | None = setting(
        None, help="With --paper-form: columns per scale", shown="64", users="expert", choices=GROUP_SIZES
    )
    solver: str | None = setting(
        None,
        help="With --paper-form: how scales and codes of up projections are found",
        shown="lsq",
        users="expert",
        choices=("lsq", "hqq"),
    )
    dense_layers: int | None = setting(
        None,
        help="Number of first layers in which all channels are refined, or computed with --paper-form",
        shown="0, or 1 with --paper-form",
        users="expert",
        minimum=0,
    )
    samples: int = shared.samples(64)
    sequence_length: int = shared.sequence_length()
    device: str = shared.device()
    name: ClassVar[str] = "floe"
    summary: ClassVar[str] = (
        "coarse weights of all channels, and 4-bit residuals that refine the most active ones; needs a calibration text"
    )
    implementation: ClassVar[str] = "moepack.methods.floe.method:Floe"
    seconds: ClassVar[float | None] = 150
