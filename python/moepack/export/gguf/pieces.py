"""BPE over pieces of sentences, as SentencePiece makes it for Llama and Mixtral: spaces are "\u2581", bytes fall back.

llama.cpp joins the neighbours whose joint piece has the highest score, whichever pair it comes from; merges join pairs
in their own order. Both give the same tokens where every pair that joins to a piece is a merge, and where merges come
piece by piece: then a piece's score is how early its merges come.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["are_pieces", "begins_with_space", "scores"]

_SPACE = "\u2581"


def are_pieces(content: Mapping[str, Any]) -> bool:
    """Whether a `tokenizer.json` describes pieces with spaces as llama.cpp knows them."""
    rule = content.get("pre_tokenizer") or {}
    if not content["model"].get("byte_fallback"):
        return False
    if rule:
        known = rule.get("type") == "Metaspace" and rule.get("replacement") == _SPACE and not rule.get("split", True)
        return known and not content.get("normalizer")
    steps = (content.get("normalizer") or {}).get("normalizers", [])
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    return bool(steps) and steps[-1] == replaced and all(step.get("prepend") == _SPACE for step in steps[:-1])


def begins_with_space(content: Mapping[str, Any]) -> bool:
    """Whether text is read as if a space came before it."""
    rule, steps = content.get("pre_tokenizer") or {}, (content.get("normalizer") or {}).get("normalizers", [])
    return rule.get("prepend_scheme") in ("first", "always") or len(steps) > 1


def scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float] | None:
    """A score for each token, higher for pieces that are joined earlier; None where no scores give the same tokens."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    order = [ranks[left + right] for left, right in merges]
    known, pairs = set(tokens), {(left, right) for left, right in merges}
    complete = all(
        (piece[:at], piece[at:]) in pairs
        for piece in ranks
        for at in range(1, len(piece))
        if piece[:at] in known and piece[at:] in known
    )
    if order != sorted(order) or not complete:
        return None
    return [-float(ranks.get(token, len(ranks))) for token in tokens]
