"""Draws charts as inline SVG: heat maps of values by layer, projection and expert, and bars of sizes by role.

Colours are CSS variables of the page, so one drawing supports light and dark mode. A cell of a heat map is a mix of the
two ends of its scale. All values are also available as titles and in tables.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

__all__ = ["HeatRow", "Scale", "heat_map", "legend", "short_layer", "size_bars"]

LEFT, GAP, TOP = 104, 14, 26
"""Space for row names, between column groups, and for column names, in units of the drawing."""

WIDTH = 960

SEPARATE = 64
"""Maximum number of experts drawn individually with titles. More would make the page large."""


@dataclass(frozen=True)
class HeatRow:
    """A row of a heat map: its name, and the values of each column group (possibly empty)."""

    name: str
    groups: Sequence[Sequence[float]]


@dataclass(frozen=True)
class Scale:
    """Maps values to shades.

    Attributes:
        low, high: the values at both ends.
        spell: formats a value with its unit.
        logarithmic: whether the scale is logarithmic.
    """

    low: float
    high: float
    spell: Callable[[float], str]
    logarithmic: bool = False

    @classmethod
    def over(cls, values: Sequence[float], spell: Callable[[float], str], logarithmic: bool = False) -> "Scale":
        """Return the scale from the smallest to the largest value."""
        positive = [value for value in values if value > 0 or not logarithmic]
        return cls(min(positive, default=0.0), max(positive, default=1.0), spell, logarithmic)

    def share(self, value: float) -> int:
        """Return the position of a value, from 0 to 100."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = (math.log(max(each, 1e-12)) for each in (low, high, value))
        return 50 if high <= low else round(100 * min(1.0, max(0.0, (value - low) / (high - low))))


def heat_map(title: str, columns: Sequence[str], rows: Sequence[HeatRow], scale: Scale, entry: str = "expert") -> str:
    """Draw values by row and column group.

    Args:
        title: text for screen readers.
        columns: names of the column groups.
        rows: the rows from top to bottom.
        scale: the scale of the shades.
        entry: what an entry of a group is called.
    """
    width = (WIDTH - LEFT - GAP * (len(columns) - 1)) / len(columns)
    height = 22 if len(rows) <= 16 else 14 if len(rows) <= 40 else 9
    total = TOP + height * len(rows) + 2
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {total}" role="img" aria-label="{escape(title)}">']
    for number, column in enumerate(columns):
        parts.append(
            f'<text class="axis" x="{LEFT + number * (width + GAP):.1f}" y="{TOP - 9}">{escape(column)}</text>'
        )
    skip = 1 if height >= 14 else 4
    for line, row in enumerate(rows):
        y = TOP + line * height
        if line % skip == 0:
            parts.append(f'<text class="axis end" x="{LEFT - 12}" y="{y + height - 6}">{escape(row.name)}</text>')
        for number, values in enumerate(row.groups):
            place = f"{row.name}, {columns[number]}"
            parts.append(f'<g class="heat" transform="translate({LEFT + number * (width + GAP):.1f} {y})">')
            parts.extend(_cells(values, width, height - (2 if height >= 14 else 1), scale, place, entry))
            parts.append("</g>")
    return "\n".join([*parts, "</svg>"])


def _cells(values: Sequence[float], width: float, height: int, scale: Scale, place: str, entry: str) -> list[str]:
    """Draw the rectangles of a group's values. Equal neighbours share one if all are equal or there are many."""
    step, cells, first = width / max(len(values), 1), [], 0
    texts = [scale.spell(value) for value in values]
    merged = len(values) > SEPARATE or len(set(texts)) == 1
    for _, run in groupby(range(len(values)), lambda i: texts[i] if merged else i):
        count, text, value = len(list(run)), texts[first], values[first]
        which = f" {first}" if count == 1 else f"s {first} to {first + count - 1}"
        name = (
            place if len(values) == 1 else f"{entry}{which}" if len(values) > SEPARATE else f"{place}, {entry}{which}"
        )
        gap = 1 if step * count > 4 else 0
        rectangle = f'x="{first * step:.1f}" width="{step * count - gap:.1f}" height="{height}"'
        title = f"<title>{escape(name)}: {escape(text)}</title>"
        cells.append(f'<rect style="--p:{scale.share(value)}%" {rectangle}>{title}</rect>')
        first += count
    return cells


def legend(scale: Scale, what: str) -> str:
    """Draw the scale of a heat map as a strip with its ends and its meaning."""
    steps = "".join(f'<i class="heat" style="--p:{share}%"></i>' for share in range(0, 101, 10))
    low, high = escape(scale.spell(scale.low)), escape(scale.spell(scale.high))
    if low == high:
        return f'<p class="legend">{escape(what)}: {low} everywhere</p>'
    return f'<p class="legend">{escape(what)} <span>{low}</span><b class="strip">{steps}</b><span>{high}</span></p>'


def size_bars(bars: Sequence[tuple[str, Sequence[tuple[str, int, str]]]], spell: Callable[[float], str]) -> str:
    """Draw stacked bars on one scale.

    Args:
        bars: the name of each bar and its segments: role, bytes, colour class.
        spell: formats bytes.
    """
    most = max(sum(size for _, size, _ in segments) for _, segments in bars) or 1
    reach, height, pitch = WIDTH - LEFT - 96, 34, 52
    drawn = f'<svg class="chart" viewBox="0 0 {WIDTH} {pitch * len(bars)}" role="img" aria-label="Sizes by role">'
    parts = [drawn]
    for line, (name, segments) in enumerate(bars):
        x, y = float(LEFT), line * pitch + 4
        parts.append(f'<text class="axis end" x="{LEFT - 12}" y="{y + 22}">{escape(name)}</text>')
        for role, size, colour in segments:
            width = reach * size / most
            title = f"<title>{escape(name)}, {escape(role)}: {escape(spell(size))}</title>"
            box = f'x="{x:.1f}" y="{y}" width="{max(width - 1, 0.4):.1f}" height="{height}"'
            parts.append(f'<rect class="{colour}" {box}>{title}</rect>')
            x += width
        total = spell(sum(size for _, size, _ in segments))
        parts.append(f'<text class="figure" x="{x + 10:.1f}" y="{y + 23}">{escape(total)}</text>')
    return "\n".join([*parts, "</svg>"])


def short_layer(module: str) -> str:
    """Return `layer 3` for `model.layers.3.mlp.experts`, `decoder 1` in a decoder; otherwise the path's last part."""
    found = re.search(r"(?:(encoder|decoder)\.)?(?:layers|block|h)\.(\d+)", module)
    return f"{found[1] or 'layer'} {found[2]}" if found else module.rpartition(".")[2]
