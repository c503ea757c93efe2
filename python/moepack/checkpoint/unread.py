"""Tensors that the model does not have: transformers does not read them, and they have no effect.

Some belong there (layers of multi-token prediction, frequencies that the model computes itself), others are a mistake:
an adapter that was never merged, a norm of another architecture, layers beyond those that config.json counts. Nobody
can tell which, so all of them are told.
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
"""The most places that a note names."""


def is_adapter(name: str) -> bool:
    """Say whether a tensor is part of an adapter that was not merged, as peft calls them: `lora_A`, `lora_embedding_B`,
    `lora_magnitude_vector`."""
    return ".lora_" in name


@without_collector()
def find_unread(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The tensors that become no parameter of the model; none where transformers cannot build it, which is told by
    whoever needs the model. No tensor is read."""
    try:
        model = meta_model(checkpoint.path, checkpoint.config)
    except Exception:  # whatever a class of transformers makes of values that it does not expect
        return ()
    return Names(checkpoint, model).unread


def unread_notes(checkpoint: Checkpoint, unread: Collection[str]) -> Iterator[str]:
    """What a user should know of tensors without effect, in full sentences."""
    if unread:
        places = _places(checkpoint.names(), frozenset(unread))
        more = [f"{len(places) - SHOWN} more places"] if len(places) > SHOWN else []
        packed = ", but for experts that `--mtp-bits` packs" if any(".experts." in name for name in unread) else ""
        yield (
            f"{_count(unread)} no effect: transformers' model has no such parameters (multi-token prediction, say). "
            f"They are kept as they are{packed}: {'; '.join([*places[:SHOWN], *more])}."
        )
    if any(map(is_adapter, unread)) or (checkpoint.path / ADAPTER).is_file():
        yield (
            "An adapter lies in the checkpoint and is not applied: if it is to count, merge it into the weights first "
            "(`merge_and_unload` of peft)."
        )


def _count(unread: Collection[str]) -> str:
    return "1 tensor has" if len(unread) == 1 else f"{len(unread)} tensors have"


def _places(names: Collection[str], unread: Collection[str]) -> list[str]:
    """The modules whose tensors are never read. Modules that differ only in the layer share one entry."""
    read = {module for name in names if name not in unread for module in _modules(name)}
    found: dict[str, list[str]] = {}
    for name in (name for name in names if name in unread):
        place = next((module for module in _modules(name) if module not in read), name)
        found.setdefault(_without_numbers(place), []).append(name)
    return [_place(members, "*" in place) for place, members in found.items()]


def _modules(name: str) -> list[str]:
    """The modules in a tensor's path, outermost first."""
    return [name[: match.start()] for match in re.finditer(r"\.", name)]


def _without_numbers(place: str) -> str:
    """A path with a star in place of each layer number."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", place)


def _place(members: list[str], starred: bool) -> str:
    """A tensor's name, or the innermost module that has all of several tensors, and their number."""
    if len(members) == 1:
        return members[0]
    paths = [_modules(_without_numbers(name) if starred else name) for name in members]
    shared = [together[0] for together in takewhile(lambda each: len(set(each)) == 1, zip(*paths, strict=False))]
    return f"{shared[-1] if shared else members[0]}: {len(members)} tensors"
