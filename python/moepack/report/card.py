"""Renders the model card: README.md with YAML front matter for the Hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from moepack.report.facts import Facts
from moepack.report.page import loading_code
from moepack.textfile import read_text
from moepack.units import size

__all__ = ["CARD", "Source", "is_own_card", "read_source", "render_card"]

CARD = "README.md"
LIBRARY = "moepack"
MARK = "<!-- The original's card follows. -->"
CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets", "base_model")
"""Fields of the original's front matter that also apply to the packed model."""


class Source:
    """The original's card.

    Attributes:
        data: front matter.
        text: text with headings one level deeper; empty if there is none.
    """

    def __init__(self, data: dict[str, Any], text: str) -> None:
        self.data, self.text = data, text


def read_source(*places: Path) -> Source:
    """Return the first card found in the directories. From a card written by `report`, return the original part.

    An unreadable card is skipped.
    """
    for place in places:
        try:
            card = ModelCard(read_text(place / CARD), ignore_metadata_errors=True)
        except (OSError, ValueError):
            continue
        data = {key: value for key, value in _fields(card).items() if key in CARRIED}
        own, _, original = card.text.partition(MARK)
        return Source(data, original.strip() if MARK in card.text else _lowered(own).strip())
    return Source({}, "")


def is_own_card(text: str) -> bool:
    """Return whether the text of a card was rendered by `render_card`."""
    return _fields(ModelCard(text, ignore_metadata_errors=True)).get("library_name") == LIBRARY


def _fields(card: Any) -> dict[str, Any]:
    fields: dict[str, Any] = card.data.to_dict()
    return fields


def render_card(facts: Facts, source: Source) -> str:
    """Render the model card of a packed model."""
    data = {key: value for key, value in source.data.items() if key != "base_model"}
    base = facts.base_model or source.data.get("base_model")
    if base:
        data |= {"base_model": base, "base_model_relation": "quantized"}
    data.setdefault("pipeline_tag", "text2text-generation" if facts.seq2seq else "text-generation")
    tags = ["moepack", "quantized", "mixture-of-experts", facts.manifest.architecture]
    front = ModelCardData(library_name=LIBRARY, tags=tags, **data).to_yaml()
    parts = [f"---\n{front}\n---", f"# {facts.name}, packed", facts.summary(), *_sections(facts)]
    if source.text:
        parts += ["## The original's card", MARK, source.text]
    return "\n\n".join(parts) + "\n"


def _sections(facts: Facts) -> list[str]:
    made = f"Made by moepack with `{facts.manifest.method}` ({facts.settings})."
    parts = [made, f"## How to load it\n```python\n{loading_code('THIS-MODEL')}\n```", _table(facts)]
    if facts.quality is not None:
        parts.append(_quality(facts))
    return parts


def _table(facts: Facts) -> str:
    lines = ["## Size", "| role | bits per weight | before | after |", "|---|---|---|---|"]
    for role in facts.roles:
        bits = "unchanged" if role.bits_per_weight is None else f"{role.bits_per_weight:.2f}"
        lines.append(f"| {role.role} | {bits} | {size(role.before)} | {size(role.after)} |")
    before, after = map(size, facts.sizes)
    return "\n".join([*lines, f"| **directory** | | **{before}** | **{after}** |"])


def _quality(facts: Facts) -> str:
    assert facts.quality is not None
    figures, quality = facts.quality.figures, facts.quality
    about = f"{figures.tokens:,} tokens of {quality.text}, windows of 512, float32"
    if figures.reference_loss is None:
        return f"## Quality\nLoss {figures.loss:.4f} nats per token, perplexity {figures.perplexity:.3f} ({about})."
    return "\n".join(
        [
            f"## Quality\n{about[0].upper()}{about[1:]}:\n",
            "| | original | packed |",
            "|---|---|---|",
            f"| loss, nats per token | {figures.reference_loss:.4f} | {figures.loss:.4f} |",
            f"| perplexity | {figures.reference_perplexity:.3f} | {figures.perplexity:.3f} |",
            f"| mean KL divergence from the original, nats | | {figures.kl:.4f} |",
            f"| same token ranked first | | {figures.top1_agreement:.2%} |",
        ]
    )


def _lowered(text: str) -> str:
    """Return a card's text with headings one level deeper."""
    fenced, lines = False, []
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        lines.append(f"#{line}" if line.startswith("#") and not fenced else line)
    return "\n".join(lines)
