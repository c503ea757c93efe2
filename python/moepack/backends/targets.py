"""The speeds of a machine that will run a model: this one, a named one, or one that `moepack doctor --json` described.

Named tables are references for a kind of machine. Figures of one core are multiplied by eight for eight cores. Integers
are limited by memory there, so that the table of a kind has few entries.
"""

import json
from pathlib import Path

from moepack.backends.speeds import Speeds, speeds_here

__all__ = ["GPU_SPEEDS", "NAMED", "SPEEDS", "speeds_of"]

SPEEDS, GPU_SPEEDS = "speeds", "GPU speeds"
"""Sections of `moepack doctor --json`."""

NAMED = {
    # benches/results/coded-dependent-zen3.json (one core, Gaussian codes), two channels of DDR4-3200.
    "avx2-8core": Speeds(
        "avx2-8core",
        {
            "int2": 220e9, "int3": 220e9, "int4": 220e9, "int8": 110e9,
            "coded2": 32.9e9, "coded3": 33.4e9, "coded4": 28.6e9,
        },
        40e9,
    ),
    # benches/results/expected-zen5.json (one core), two channels of DDR5-5600.
    "avx512": Speeds(
        "avx512",
        {"int2": 650e9, "int3": 640e9, "int4": 600e9, "int8": 250e9, "coded2": 77e9, "coded3": 69e9, "coded4": 62e9},
        70e9,
    ),
    # benches/results/gpu-h100.json and gpu-coded-h100.json: "Mixtral down", one token; 2 and 4 bits as for plain codes,
    # times the ratio of dependent to plain codes at 3 bits.
    "h100": Speeds(
        "h100",
        {
            "int2": 4190e9, "int3": 3900e9, "int4": 3710e9, "int8": 2370e9,
            "coded2": 1520e9, "coded3": 1480e9, "coded4": 1450e9,
        },
        2600e9,
    ),
}  # fmt: skip
"""Reference tables by name."""


def speeds_of(target: str | None, device: str = "cpu") -> Speeds:
    """Return the speeds of a target.

    Args:
        target: a name of `NAMED`, a file of `moepack doctor --json`, or None for this machine, which is measured if its
            speeds are not kept.
        device: whether the processor ("cpu") or the GPU of this machine or of the file is meant.

    Raises:
        ValueError: the target is neither a name nor such a file.
        DeviceError: the GPU of this machine cannot be used.
    """
    if target is None:
        return speeds_here(device)
    if target in NAMED:
        return NAMED[target]
    section = SPEEDS if device == "cpu" else GPU_SPEEDS
    try:
        return Speeds.from_json(json.loads(Path(target).read_text(encoding="utf-8"))[section])
    except OSError as error:
        names = ", ".join(NAMED)
        raise ValueError(f"target {target!r} is not {names} or a file: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{target} has no {section} of `moepack doctor --json`: {error}") from error
