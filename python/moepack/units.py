"""Numbers as people read them."""


def size(count: float) -> str:
    """Return bytes in decimal units: `size(1_500_000)` is `1.5 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def speed(weights: float) -> str:
    """Return weights a second: `speed(2.5e8)` is `250M weights/s`."""
    for unit in ("", "k", "M"):
        if weights < 999.5:
            return f"{weights:.3g}{unit} weights/s"
        weights /= 1000
    return f"{weights:.3g}G weights/s"
