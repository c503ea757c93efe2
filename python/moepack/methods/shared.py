"""Settings that several methods declare alike."""

from typing import Any

from moepack.methods.settings import setting
from moepack.textfile import BUILT_IN, NO_TEXT

__all__ = [
    "calibration",
    "codes",
    "default_calibration",
    "device",
    "group",
    "minimum_tokens",
    "samples",
    "sequence_length",
    "span_seed",
]


def calibration(default: str | None = BUILT_IN, **declared: Any) -> Any:
    """Return the setting `calibration`; it enters the manifest by its fingerprint."""
    about = (
        "Calibration text, similar to what the model will read: text file, JSON Lines, directory, Hub data set, "
        "`built-in` (a text that comes with moepack), `self` (samples of the model itself), or `none`."
    )
    return setting(default, help=about, shown="", users="basic", recorded=False, absent=NO_TEXT, **declared)


def default_calibration() -> Any:
    """Return the setting `calibration` of methods that also pack models that cannot run on a text."""
    return calibration(note="by default `built-in`, or `none` if the model cannot run on it")


def samples(default: int = 128) -> Any:
    """Return the setting `samples`."""
    return setting(default, help="Number of calibration windows", users="expert", minimum=1)


def sequence_length(default: int = 512) -> Any:
    """Return the setting `sequence_length`."""
    return setting(default, help="Tokens per window", users="expert", minimum=1)


def group() -> Any:
    """Return the setting `group`, which bounds the memory of a stage."""
    return setting(16, help="Experts that are quantized together", minimum=1)


def minimum_tokens() -> Any:
    """Return the setting `minimum_tokens`."""
    return setting(64, help="Experts with fewer calibration tokens are listed in the report's notes", recorded=False)


def codes() -> Any:
    """Return the setting `codes` of methods with coded integers."""
    about = (
        "Kind of entropy-coded integers: `dependent` (default; trellis-coded, more accurate, runs at most a sixth "
        "slower on CPUs) or `plain`."
    )
    return setting("dependent", help=about, shown="", users="expert", choices=("dependent", "plain"))


def span_seed() -> Any:
    """Return the setting `seed` of methods that calibrate any model."""
    return setting(0, help="Seed of the span corruption of encoder-decoder models")


def device() -> Any:
    """Return the setting `device`."""
    about = "Device for calibration and solvers: cpu (default) or cuda."
    return setting("cpu", help=about, shown="", users="basic", recorded=False)
