"""The three preferences between loss and speed at a given size, and what each gives.

`quality` has the least loss. `speed` minimizes the loss times the square of the time per token. `balance` has the least
loss among models that decode at no less than `BALANCE` times the speed of `speed`.
"""

from dataclasses import dataclass

from moepack.backends.speeds import Speeds

__all__ = ["BALANCE", "Preference", "expected_preferences", "slow_coded"]

BALANCE = 0.7
"""Minimum speed of `balance`, relative to that of `speed`."""

WIDTHS = (2, 3, 4)
"""Widths in bits at which coded integers are compared with integers in groups."""

SCALE_BITS = 0.25
"""Bits per weight of the scales of groups of 64."""


@dataclass(frozen=True)
class Preference:
    """What a preference gives.

    Attributes:
        name: a value of the setting `prefer`.
        seconds: expected time of a decoding step of one sequence.
        loss: expected loss increase in nats per token; None if unknown.
    """

    name: str
    seconds: float
    loss: float | None

    @property
    def tokens_per_second(self) -> float:
        """The expected decoding speed of one sequence."""
        return 1 / self.seconds


def expected_preferences(bits: float, weights: float, rest: float, speeds: Speeds) -> tuple[Preference, ...]:
    """Estimate the preferences from a size alone, if all tensors have equal bits.

    Args:
        bits: bits per packed weight.
        weights: packed weights that a token reads.
        rest: time of a decoding step without their products in seconds.
        speeds: the speeds of the machine.
    """
    coded = rest + speeds.seconds("coded", bits, weights, weights * bits / 8)
    fast = min(coded, rest + speeds.seconds("int", max(bits - SCALE_BITS, 0.0), weights, weights * bits / 8))
    return (
        Preference("quality", coded, None),
        Preference("balance", min(coded, fast / BALANCE), None),
        Preference("speed", fast, None),
    )


def slow_coded(speeds: Speeds) -> bool:
    """Return whether products of coded integers may be too slow for `balance` at some width."""
    return any(
        speeds.seconds("coded", bits, 1.0, bits / 8) * BALANCE
        > speeds.seconds("int", bits, 1.0, (bits + SCALE_BITS) / 8)
        for bits in WIDTHS
    )
