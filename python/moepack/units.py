"""Parses and formats sizes, rates and times for users."""

import math
import re

_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def byte_count(text: str | float) -> int:
    """Parse a size such as `8GB` (decimal), `7.5 GiB` (binary) or `5e6` into bytes.

    Raises:
        ValueError: the text is not a size above 0.
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt]?)(i?)b)?", str(text).strip().lower())
    try:
        number = float(found[1]) if found else 0.0
    except ValueError:
        number = 0.0
    count = number * (1024 if found and found[3] else 1000) ** _PREFIXES[found[2] or ""] if found else 0.0
    if not 1 <= count < math.inf:
        raise ValueError(f"{text!r} is not a size: write it as 8GB, 7.5GiB or a number of bytes")
    return int(count)


def size(count: float) -> str:
    """Format bytes in decimal units: `size(1_500_000)` is `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def speed(rate: float, unit: str = "weights") -> str:
    """Format a rate: `speed(2.5e8)` is `250M weights/s`."""
    for prefix in ("", "k", "M"):
        if rate < 999.5:
            return f"{rate:.3g}{prefix} {unit}/s"
        rate /= 1000
    return f"{rate:.3g}G {unit}/s"


def duration(seconds: float) -> str:
    """Format a time with a suitable unit: `duration(5400)` is `1.5 h`."""
    for unit, length in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < length:
            return f"{max(seconds, 1):.0f} {unit}" if unit == "s" else f"{seconds:.2g} {unit}"
        seconds /= length if unit != "h" else 24
    return f"{seconds:.0f} days"


def nats(increase: float) -> str:
    """Format an increase of the loss: `nats(0.0214)` is `+0.021 nats per token`."""
    return f"{increase:+.2g} nats per token"
