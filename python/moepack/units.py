"""Numbers as people read them."""


def size(count: float) -> str:
    """Return bytes in decimal units: `size(1_500_000)` is `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def speed(rate: float, unit: str = "weights") -> str:
    """Return how many a second: `speed(2.5e8)` is `250M weights/s`."""
    for prefix in ("", "k", "M"):
        if rate < 999.5:
            return f"{rate:.3g}{prefix} {unit}/s"
        rate /= 1000
    return f"{rate:.3g}G {unit}/s"


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: `duration(5400)` is `1.5 h`."""
    for unit, length in (("s", 60), ("min", 60), ("h", 48)):
        if seconds < length:
            return f"{max(seconds, 1):.0f} {unit}" if unit == "s" else f"{seconds:.2g} {unit}"
        seconds /= length if unit != "h" else 24
    return f"{seconds:.0f} days"
