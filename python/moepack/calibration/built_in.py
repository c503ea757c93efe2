"""The calibration text that comes with the package, and windows of tokens that mix its kinds.

The text represents typical uses of models: English prose, other languages, source code, chat, mathematics and
structured data. A few windows may be all that a run reads, so kinds take turns in proportion to `WEIGHTS`, and any
prefix of the windows covers all kinds. Within a kind, its streams (a human language, a programming language) take
turns. The chunks of a stream are evenly spaced over it. No step is random.

Chats are rendered by the tokenizer's chat template if it has one.

`texts/index.json` lists the pieces with their sources and licences (docs/calibration-text.md).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["WEIGHTS", "Piece", "built_in_documents", "built_in_windows", "pieces", "turns"]

FOLDER = Path(__file__).with_name("texts")

WEIGHTS = {"prose": 5, "languages": 4, "code": 3, "dialogue": 2, "mathematics": 1, "structured": 1}
"""Kinds, and their shares of the windows."""

CHUNK = 512
"""Maximum number of successive tokens of one stream. Longer windows consist of several chunks."""

EXCERPT = 800
"""Characters of one stream at a time in `built_in_documents`."""

ROLES = {"user": "User", "assistant": "Assistant"}

Chat = list[dict[str, str]]
"""Messages in order, each with `role` and `content`."""


@dataclass(frozen=True)
class Piece:
    """A piece of the text.

    Attributes:
        file: name of its file.
        kind: one of `WEIGHTS`.
        stream: its human or programming language, or the kind.
        title: what it is.
        source: where it comes from.
        licence: `public domain`, or the licence of this package.
    """

    file: str
    kind: str
    stream: str
    title: str
    source: str
    licence: str

    def text(self, tokenizer: Any = None) -> str:
        """Return the text; chats are rendered by the tokenizer's template."""
        content = (FOLDER / self.file).read_text(encoding="utf-8")
        if not self.file.endswith(".json"):
            return content
        return "\n".join(_rendered(chat, tokenizer) for chat in json.loads(content))


@cache
def pieces() -> tuple[Piece, ...]:
    """Return the pieces in their fixed order."""
    return tuple(Piece(**entry) for entry in json.loads((FOLDER / "index.json").read_text(encoding="utf-8")))


def turns(capacities: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[str, str]]:
    """Yield (kind, stream) for one chunk after the other, until all streams are used up.

    Each kind has one turn first. The kind with the fewest turns relative to its weight follows (Adams's method of
    apportionment), so counts stay proportional. A kind without further chunks is skipped.

    Args:
        capacities: number of chunks by kind and stream.
    """
    used: dict[str, Counter[str]] = {kind: Counter() for kind in capacities}
    while open_kinds := [kind for kind, own in capacities.items() if used[kind].total() < sum(own.values())]:
        kind = min(open_kinds, key=lambda each: used[each].total() / WEIGHTS[each])
        streams = [stream for stream, most in capacities[kind].items() if used[kind][stream] < most]
        stream = min(streams, key=lambda each: used[kind][each])
        used[kind][stream] += 1
        yield kind, stream


def built_in_windows(tokenizer: Any, samples: int, length: int) -> Tensor:
    """Return token windows [N, length] int64, N <= samples; N is 0 if the text is shorter than one window.

    Args:
        tokenizer: tokenizer of the model.
        samples: requested number of windows.
        length: tokens per window.
    """
    chunk = min(length, CHUNK)
    per_window = -(-length // chunk)
    ids = {
        key: torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.int64)
        for key, text in _streams(tokenizer).items()
    }
    capacities = {kind: {s: len(own) // chunk for (k, s), own in ids.items() if k == kind} for kind in WEIGHTS}
    count = min(samples, sum(sum(own.values()) for own in capacities.values()) // per_window)
    order = list(islice(turns(capacities), count * per_window))
    chunks = {key: _spaced(ids[key], number, chunk) for key, number in Counter(order).items()}
    rows = [next(chunks[key]) for key in order]
    if not rows:
        return torch.empty(0, length, dtype=torch.int64)
    return torch.cat(rows).view(count, per_window * chunk)[:, :length].contiguous()


def built_in_documents() -> Iterator[str]:
    """Yield short excerpts of the text, in which kinds take turns as in the windows."""
    texts = _streams(None)
    capacities = {kind: {s: -(-len(t) // EXCERPT) for (k, s), t in texts.items() if k == kind} for kind in WEIGHTS}
    places: Counter[tuple[str, str]] = Counter()
    for key in turns(capacities):
        start = places[key] * EXCERPT
        places[key] += 1
        yield texts[key][start : start + EXCERPT]


def _streams(tokenizer: Any) -> dict[tuple[str, str], str]:
    """Return the text of each stream by kind and stream."""
    found: dict[tuple[str, str], list[str]] = {}
    for piece in pieces():
        found.setdefault((piece.kind, piece.stream), []).append(piece.text(tokenizer))
    return {key: "\n\n".join(texts) for key, texts in found.items()}


def _spaced(ids: Tensor, count: int, chunk: int) -> Iterator[Tensor]:
    """Yield `count` chunks at even distances, from the first token to the last."""
    slack = len(ids) - count * chunk
    for i in range(count):
        start = i * chunk + (slack * i // (count - 1) if count > 1 else 0)
        yield ids[start : start + chunk]


def _rendered(chat: Chat, tokenizer: Any) -> str:
    """Render a chat by the tokenizer's template, or plainly if there is none or it refuses the chat."""
    if getattr(tokenizer, "chat_template", None):
        try:
            return str(tokenizer.apply_chat_template(chat, tokenize=False))
        except Exception:  # templates raise exceptions of jinja2, or any other
            pass
    return "".join(f"{ROLES[message['role']]}: {message['content']}\n\n" for message in chat)
