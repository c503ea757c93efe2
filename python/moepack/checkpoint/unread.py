"""Finds tensors that are not part of the model. Transformers does not read them, so they have no effect.

Some are expected (layers of multi-token prediction, frequencies that the model computes itself). Others are mistakes:
an unmerged adapter, a norm of another architecture, more layers than config.json declares. The two cannot be told
apart, so all are reported.
"""

import re
from collections.abc import Collection, Iterator
from itertools import takewhile

from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.names import Names
from moepack.checkpoint.reader import Checkpoint
from moepack.format.hub import ADAPTER
from moepack.memory import without_collector

__all__ = ["find_unread", "is_adapter", "unread_notes"]

SHOWN = 8
"""Maximum number of places in a note."""


def is_adapter(name: str) -> bool:
    """Return whether a tensor belongs to an unmerged adapter, by peft's names: `lora_A`, `lora_embedding_B`,
    `lora_magnitude_vector`."""
    return ".lora_" in name


@without_collector()
def find_unread(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the tensors that become no parameter of the model. No tensor is read.

    Returns an empty tuple if transformers cannot build the model; callers that need the model report that error.
    """
    try:
        model = meta_model(checkpoint.path, checkpoint.config)
    except Exception:  # model classes raise arbitrary exceptions for unexpected config values
        return ()
    return Names(checkpoint, model).unread


def unread_notes(checkpoint: Checkpoint, unread: Collection[str]) -> Iterator[str]:
    """Yield notes for the user on tensors without effect, in full sentences."""
    if unread:
        places = _places(checkpoint.names(), frozenset(unread))
        more = [f"{len(places) - SHOWN} more places"] if len(places) > SHOWN else []
        packed = ", except experts that `--mtp-bits` packs" if any(".experts." in name for name in unread) else ""
        yield (
            f"{_count(unread)} no effect: transformers' model has no such parameters (for example, multi-token "
            f"prediction). They are kept unchanged{packed}: {'; '.join([*places[:SHOWN], *more])}."
        )
    if any(map(is_adapter, unread)) or (checkpoint.path / ADAPTER).is_file():
        yield (
            "The checkpoint contains an adapter, which is not applied. To apply it, merge it into the weights first "
            "(`merge_and_unload` of peft)."
        )


def _count(unread: Collection[str]) -> str:
    return "1 tensor has" if len(unread) == 1 else f"{len(unread)} tensors have"


def _places(names: Collection[str], unread: Collection[str]) -> list[str]:
    """Return the modules whose tensors are never read. Modules that differ only in the layer share one entry."""
    read = {module for name in names if name not in unread for module in _modules(name)}
    found: dict[str, list[str]] = {}
    for name in (name for name in names if name in unread):
        place = next((module for module in _modules(name) if module not in read), name)
        found.setdefault(_without_numbers(place), []).append(name)
    return [_place(members, "*" in place) for place, members in found.items()]


def _modules(name: str) -> list[str]:
    """Return the modules in a tensor's path, outermost first."""
    return [name[: match.start()] for match in re.finditer(r"\.", name)]


def _without_numbers(place: str) -> str:
    """Replace each layer number in a path by a star."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", place)


def _place(members: list[str], starred: bool) -> str:
    """Return the name of a single tensor, or the innermost module that contains all tensors and their number."""
    if len(members) == 1:
        return members[0]
    paths = [_modules(_without_numbers(name) if starred else name) for name in members]
    shared = [together[0] for together in takewhile(lambda each: len(set(each)) == 1, zip(*paths, strict=False))]
    return f"{shared[-1] if shared else members[0]}: {len(members)} tensors"
