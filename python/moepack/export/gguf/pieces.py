"""SentencePiece BPE, as used by Llama and Mixtral: spaces are "\u2581", unknown characters fall back to bytes.

llama.cpp joins the neighbours whose joined piece has the highest score, for any pair that forms the piece. Merges join
pairs in the order of the list. Both give the same tokens if every pair that joins to a piece is a merge and the merges
of a piece are consecutive. The score of a piece is then the negative rank of its merges.
"""

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["are_pieces", "begins_with_space", "scores"]

_SPACE = "\u2581"


def are_pieces(content: Mapping[str, Any]) -> bool:
    """Return whether a `tokenizer.json` describes SentencePiece pieces that llama.cpp supports."""
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
    """Return whether the tokenizer puts a space before the text."""
    rule, steps = content.get("pre_tokenizer") or {}, (content.get("normalizer") or {}).get("normalizers", [])
    return rule.get("prepend_scheme") in ("first", "always") or len(steps) > 1


def scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float] | None:
    """Return a score per token, higher for pieces joined earlier; None if no scores give the same tokens."""
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
