"""Renders the report page: one self-contained HTML file without scripts or network access."""

import math
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import takewhile

from moepack.evaluation import EvaluationReport
from moepack.report.charts import HeatRow, Scale, heat_map, legend, short_layer, size_bars
from moepack.report.contents import ORDER, Row
from moepack.report.experts import TensorValues
from moepack.report.facts import Facts
from moepack.report.quality import TEMPERATURE, Continuation
from moepack.report.style import STYLE
from moepack.units import size

__all__ = ["render_page"]

_PLACES = {name: place for place, name in enumerate((*ORDER, "q_proj", "k_proj", "v_proj", "o_proj"))}
"""Position of known column names in the order of computation."""

COLOURS = 7
"""Number of role colours. The last is for files other than tensors; the smallest roles share the one before it."""

OTHER = "tokenizer and other files"


def render_page(facts: Facts) -> str:
    """Render the page of a packed model."""
    sections = [_masthead(facts), _sizes(facts), _quality(facts), _choices(facts), _coverage(facts)]
    sections += [_continuations(facts), _loading(facts), _origin(facts)]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(facts.name)}, packed</title>
<style>{STYLE}</style>
</head>
<body>
<main>
{"".join(section for section in sections if section)}
</main>
</body>
</html>
"""


def _masthead(facts: Facts) -> str:
    before, after = facts.sizes
    figures = None if facts.quality is None else facts.quality.figures
    keys = [
        ("Size", size(after), f"was {size(before)}: {before / max(after, 1):.2f} times smaller"),
        ("Bits per packed weight", f"{facts.bits_per_weight:.2f}", "including all metadata"),
    ]
    if figures is not None and figures.reference_loss is not None and figures.kl is not None:
        change = f"{figures.loss - figures.reference_loss:+.3f}"
        keys.append(("Loss, nats per token", change, f"from {figures.reference_loss:.3f} to {figures.loss:.3f}"))
        keys.append(("Same first choice", f"{figures.top1_agreement:.1%}", f"KL divergence {figures.kl:.4f} nats"))
    elif figures is not None:
        keys.append(("Loss, nats per token", f"{figures.loss:.3f}", f"perplexity {figures.perplexity:.2f}"))
    cells = (
        f'<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd class="sub">{escape(more)}</dd></div>'
        for name, value, more in keys
    )
    lead = f'<p class="lead">{escape(facts.summary())}</p>'
    return f'<header><h1>{escape(facts.name)}, packed</h1>{lead}<dl class="key">{"".join(cells)}</dl></header>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = (), total: bool = False) -> str:
    """Render a table of HTML cells. Columns in `text` are left-aligned; with `total`, the last row is the total."""

    def line(cells: Sequence[str], tag: str) -> str:
        classes = [' class="text"' if number in text else "" for number in range(len(cells))]
        return "".join(f"<{tag}{style}>{cell}</{tag}>" for style, cell in zip(classes, cells, strict=True))

    body = [f"<tr>{line(cells, 'td')}</tr>" for cells in rows]
    if total:
        body[-1] = body[-1].replace("<tr>", '<tr class="sum">', 1)
    return f'<div class="wide"><table><tr>{line(heads, "th")}</tr>{"".join(body)}</table></div>'


def _sizes(facts: Facts) -> str:
    colour = {role.role: f"c{min(number, COLOURS - 2)}" for number, role in enumerate(facts.roles)}
    before, after = facts.sizes
    rest = before - sum(role.before for role in facts.roles), after - sum(role.after for role in facts.roles)
    bars = [
        ("before", [*((role.role, role.before, colour[role.role]) for role in facts.roles), (OTHER, rest[0], "c6")]),
        ("after", [*((role.role, role.after, colour[role.role]) for role in facts.roles), (OTHER, rest[1], "c6")]),
    ]
    rows: list[tuple[str, ...]] = [
        (
            f'<span class="swatch {colour[role.role]}"></span>{escape(role.role)}',
            "unchanged" if role.bits_per_weight is None else f"{role.bits_per_weight:.2f}",
            size(role.before),
            size(role.after),
            "" if role.bits_per_weight is None else _ratio(role.before, role.after),
        )
        for role in facts.roles
    ]
    rows.append((f'<span class="swatch c6"></span>{OTHER}', "", *map(size, rest), ""))
    rows.append(("directory", "", size(before), size(after), _ratio(before, after)))
    table = _table(("role", "bits per weight", "before", "after", "smaller by"), rows, total=True)
    return f"<section><h2>Size</h2><figure>{size_bars(bars, size)}</figure>{table}</section>"


def _ratio(before: float, after: float) -> str:
    return f"{before / after:.2f} ×" if after else ""


def _quality(facts: Facts) -> str:
    if facts.quality is None:
        hint = "Not measured. <code>moepack report OUT --reference MODEL --text FILE</code> adds loss, KL "
        return f'<section><h2>Quality</h2><p class="note">{hint}divergence and sample texts.</p></section>'
    figures = facts.quality.figures
    about = f"The first {facts.quality.chars:,} characters of {facts.quality.text}"
    lead = f"{about}: {figures.tokens:,} predicted tokens in windows of 512, both models in float32."
    table = _table(("", "original", "packed", "difference"), _figures(figures))
    note = "0.01 nats correspond to 1 % of perplexity. The divergence is zero for equal predictions."
    return f"<section><h2>Quality</h2><p>{escape(lead)}</p>{table}<p class='note'>{note}</p></section>"


def _figures(figures: EvaluationReport) -> Iterator[tuple[str, str, str, str]]:
    def row(name: str, before: float | None, after: float, form: str) -> tuple[str, str, str, str]:
        if before is None:
            return name, "", format(after, form), ""
        return name, format(before, form), format(after, form), format(after - before, f"+{form}")

    yield row("loss, nats per token", figures.reference_loss, figures.loss, ".4f")
    yield row("perplexity", figures.reference_perplexity, figures.perplexity, ".3f")
    if figures.kl is not None:
        yield "mean KL divergence from the original, nats per token", "", f"{figures.kl:.4f}", ""
        yield "top-1 agreement", "", f"{figures.top1_agreement:.2%}", ""


def _choices(facts: Facts) -> str:
    """Render heat maps of bits and errors, a table of formats, and a collapsed table of all tensors."""
    parts = ["<section><h2>Formats by layer</h2>"]
    parts.append("<p>Each row is a layer, each column a projection with one cell per expert.</p>")
    chosen = [bits for each in facts.values for bits in each.bits]
    low, high = math.floor(min(chosen, default=0)), math.ceil(max(chosen, default=1))
    bits = Scale(low, max(high, low + 1), lambda value: f"{value:.2f} bits")
    parts.append(_maps(facts, "Bits per weight", bits, {id(each): each.bits for each in facts.values}))
    errors = {id(each): each.errors for each in facts.values if each.errors is not None}
    if errors:
        known = [error for values in errors.values() for error in values]
        scale = Scale.over(known, lambda value: f"{value:.1%}")
        parts.append(_maps(facts, "Relative error of the weights (root mean square)", scale, errors))
    parts.append(_formats(facts.rows))
    return "".join([*parts, "</section>"])


def _maps(facts: Facts, what: str, scale: Scale, values: dict[int, tuple[float, ...]]) -> str:
    """Render the heat maps of one quantity, for experts and for linear layers."""
    parts = [f"<h3>{escape(what)}</h3><figure>"]
    for experts, title in (True, "experts"), (False, "linear layers"):
        chosen = [each for each in facts.values if each.experts == experts and id(each) in values]
        if not chosen:
            continue
        columns = sorted(dict.fromkeys(map(_column, chosen)), key=lambda name: _PLACES.get(name, len(_PLACES)))
        rows: dict[str, dict[str, tuple[float, ...]]] = {}
        for each in chosen:
            rows.setdefault(short_layer(each.module), {})[_column(each)] = values[id(each)]
        lines = [HeatRow(name, [row.get(column, ()) for column in columns]) for name, row in rows.items()]
        parts.append(heat_map(f"{what}, {title}", columns, lines, scale))
    return "".join([*parts, legend(scale, what), "</figure>"])


def _column(values: TensorValues) -> str:
    return values.projection if values.experts else values.module.rpartition(".")[2]


def _formats(rows: Sequence[Row]) -> str:
    """Render the formats by role, then all packed tensors."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.role, row.format), []).append(row)
    lines = []
    for (role, kind), group in sorted(groups.items(), key=lambda item: -sum(row.before for row in item[1])):
        before, after = sum(row.before for row in group), sum(row.after for row in group)
        bits = 8 * after / max(sum(row.weights for row in group), 1)
        cells = (escape(role), escape(kind), str(len(group)), f"{bits:.2f}", size(before), size(after))
        lines.append((*cells, _ratio(before, after)))
    heads = ("role", "format", "tensors", "bits per weight", "before", "after", "smaller by")
    each = [
        (
            escape(f"{row.layer}.{row.projection}"),
            escape(row.format),
            escape(" × ".join(map(str, row.shape))),
            f"{row.bits_per_weight:.3f}",
            size(row.before),
            size(row.after),
        )
        for row in rows
    ]
    table = _table(("tensor", "format", "shape", "bits per weight", "before", "after"), each, (1,))
    summary = f"<summary>All {len(rows)} packed tensors</summary>"
    return f"<h3>Formats</h3>{_table(heads, lines, (1,))}<details>{summary}{table}</details>"


def _coverage(facts: Facts) -> str:
    """Render the calibration tokens of each expert, if they were recorded."""
    seen = {short_layer(each.module): each.tokens for each in facts.values if each.tokens is not None}
    if not seen:
        return ""
    counts = [count for tokens in seen.values() for count in tokens]
    scale = Scale.over(counts, lambda value: f"{value:,.0f} tokens", logarithmic=True)
    rows = [HeatRow(name, [tokens]) for name, tokens in seen.items()]
    unseen = sum(count == 0 for count in counts)
    verdict = "Every expert received some." if not unseen else f"{unseen} of {len(counts)} experts received none."
    text = f"Number of calibration tokens that the router sent to each expert. {verdict}"
    drawn = heat_map("Calibration tokens by expert", ["experts"], rows, scale)
    shown = f"<figure>{drawn}{legend(scale, 'Calibration tokens (logarithmic)')}</figure>"
    return f"<section><h2>Coverage by the calibration text</h2><p>{escape(text)}</p>{shown}</section>"


def _continuations(facts: Facts) -> str:
    found = () if facts.quality is None else facts.quality.continuations
    if not found:
        return ""
    lead = f"Sampled at temperature {TEMPERATURE:g} with the same random numbers"
    lead += "; coloured after the first difference from the original." if found[0].original is not None else "."
    return f"<section><h2>Sample texts</h2><p>{lead}</p>{''.join(map(_pair, found))}</section>"


def _pair(each: Continuation) -> str:
    both = zip(each.packed if each.original is None else each.original, each.packed, strict=False)
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    packed = f'{escape(each.packed[:shared])}<span class="parted">{escape(each.packed[shared:])}</span>'
    sides = [] if each.original is None else [("the original", escape(each.original))]
    columns = "".join(f"<div><h4>{name}</h4><p>{text}</p></div>" for name, text in [*sides, ("packed", packed)])
    quote = f"<blockquote>{escape(each.prompt)} …</blockquote>"
    return f'<div class="pair">{quote}<div class="sides">{columns}</div></div>'


def _loading(facts: Facts) -> str:
    return f"""<section><h2>How to load it</h2>
<pre>{escape(loading_code())}</pre>
<p>On the command line:</p>
<pre>moepack generate OUT --prompt "Once upon a time"
moepack verify OUT        # detects any flipped bit
moepack export OUT PLAIN --to bf16</pre></section>"""


def loading_code(place: str = "OUT") -> str:
    """Return the Python code that loads the model from `place`, a directory or Hub id."""
    return f"""import moepack
from transformers import AutoTokenizer

model = moepack.load("{place}")  # on a GPU: device="cuda"
tokenizer = AutoTokenizer.from_pretrained("{place}")
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=60)[0]))"""


def _origin(facts: Facts) -> str:
    manifest, fingerprint = facts.manifest, facts.manifest.fingerprint
    rows = [
        ("original", facts.base_model or facts.name),
        ("architecture", manifest.architecture),
        ("method", manifest.method),
        ("settings", facts.settings),
        ("format", f"version {manifest.version}, written by moepack {fingerprint.get('moepack', '')}"),
        ("fingerprint of the original", fingerprint.get("model", "")[:16]),
    ]
    cells = [(escape(name), f'<span style="white-space:normal">{escape(value)}</span>') for name, value in rows]
    note = "Sizes are decimal (1 MB is 1,000,000 bytes) and include all metadata."
    return f"<section><h2>How it was made</h2>{_table(('', ''), cells, (1,))}</section><footer>{note}</footer>"
