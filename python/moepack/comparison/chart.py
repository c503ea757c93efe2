"""The chart of a comparison: loss increase over size, one line per method, as SVG without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

__all__ = ["draw"]

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 780, 440, 70, 40, 220, 50
"""Size and margins of the picture in pixels."""

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2")

LEAST = 1e-4
"""Lower end of the logarithmic axis in nats; smaller differences are noise."""


def draw(title: str, axis: str, lines: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Return an SVG picture.

    Args:
        title: title above the chart.
        axis: label of the horizontal axis.
        lines: by method, size and loss increase of each point; the loss axis is logarithmic.
    """
    points = [point for line in lines.values() for point in line]
    low, high = min((x for x, _ in points), default=0.0), max((x for x, _ in points), default=1.0)
    increases = [max(y, LEAST) for _, y in points] or [LEAST, 1.0]
    ticks = _ticks(min(increases), max(increases))

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - low) / ((high - low) or 1.0)

    def down(y: float) -> float:
        part = math.log(max(y, LEAST) / ticks[0]) / math.log(ticks[-1] / ticks[0])
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * min(max(part, 0.0), 1.0)

    shapes = [_text(LEFT, TOP - 18, title, "start", 15), _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, axis)]
    for tick in ticks:
        shapes.append(f'<path d="M{LEFT} {down(tick):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        shapes.append(_text(LEFT - 8, down(tick) + 4, f"+{tick:.6g}", "end"))
    for x in _round_numbers(low, high):
        shapes.append(f'<path d="M{across(x):.1f} {HEIGHT - BOTTOM}v5" stroke="#999"/>')
        shapes.append(_text(across(x), HEIGHT - BOTTOM + 18, f"{x:.6g}"))
    for number, (name, line) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in sorted(line))
        shapes.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>' if line else "")
        shapes += [f'<circle cx="{across(x):.1f}" cy="{down(y):.1f}" r="3.5" fill="{colour}"/>' for x, y in line]
        shapes.append(_text(WIDTH - RIGHT + 16, TOP + 18 * number + 4, name, "start", fill=colour))
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _ticks(least: float, most: float) -> list[float]:
    """The numbers 1, 2 and 5 times powers of ten from at most `least` to at least `most`, two of them at least."""
    decades = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 2)
    marks = [factor * 10.0**decade for decade in decades for factor in (1, 2, 5)]
    first = max(number for number, mark in enumerate(marks) if mark <= least * (1 + 1e-9))
    last = next(number for number, mark in enumerate(marks) if mark >= most and number > first)
    return marks[first : last + 1]


def _round_numbers(low: float, high: float) -> list[float]:
    """Multiples of a round step between two numbers, about six; the numbers themselves if they are equal."""
    if high <= low:
        return [low]
    unit = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(factor * unit for factor in (1, 2, 5, 10) if (high - low) / (factor * unit) <= 8)
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "middle", size: int = 12, fill: str = "#333") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{fill}"'
    return f"<text {place}>{escape(text)}</text>"
