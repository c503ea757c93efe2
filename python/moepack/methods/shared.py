"""Settings that several methods declare alike."""

from typing import Any

from moepack.methods.settings import REQUIRED, setting

__all__ = ["calibration", "device", "samples", "sequence_length"]


def calibration(default: Any = REQUIRED, **declared: Any) -> Any:
    """Return the setting `calibration`; it enters the manifest by its fingerprint."""
    about = "Calibration text, like what the model will read: text file, JSON Lines, directory or Hub data set."
    return setting(default, help=about, users="basic", recorded=False, **declared)


def samples(default: int = 128) -> Any:
    """Return the setting `samples`."""
    return setting(default, help="Number of calibration windows", users="expert", minimum=1)


def sequence_length(default: int = 512) -> Any:
    """Return the setting `sequence_length`."""
    return setting(default, help="Tokens per window", users="expert", minimum=1)


def device() -> Any:
    """Return the setting `device`."""
    about = "Device for calibration and solvers: cpu (default) or cuda."
    return setting("cpu", help=about, shown="", users="basic", recorded=False)
