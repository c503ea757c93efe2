"""Bits by name: `down_proj=4,experts.{0..3}=8,layers.0=16,*=3`.

A pattern is one or more components of a tensor's name in sequence, separated by dots. Within a component, `*` and `?`
match as in file names; a pattern `*` alone matches all tensors. `{0..3}` stands for 0, 1, 2 or 3, and `{a,b}` for a or
b. The names are those of the packed directory (`model.layers.0.mlp.experts.down_proj`), with the number of an expert
(`model.layers.0.mlp.experts.3.down_proj`), those of the checkpoint, and the roles (`attention`, `shared`, `mlp`,
`head`, `embedding`).

The first pattern that matches a tensor, or an expert of it, decides. Patterns with 16 bits, which leave tensors
unpacked, precede the others, because the experts of a layer are packed together or not at all; `*=16` keeps its place.
A pattern that matches nothing, or only what preceding patterns decide, is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import product
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from moepack.errors import OverrideError
from moepack.textfile import read_text

__all__ = ["ALL", "UNPACKED", "Named", "Overrides", "decide", "is_by_name", "split_bits"]

UNPACKED = 16.0
"""Bits that leave a tensor unpacked."""

ALL = "*"
"""The pattern of all tensors that the method packs. It may come last and match nothing that is left."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_SEPARATORS = re.compile(r"[,\n](?![^{]*\})")
_NUMBER = re.compile(r"\d+(\.\d+)?|\.\d+")

MOST_ALTERNATIVES = 4096
"""Maximum number of patterns that braces expand to."""

NEAR = 3
"""Number of near misses that an error lists."""


@dataclass(frozen=True)
class Overrides:
    """Bits by name.

    Attributes:
        items: patterns and their bits, in order of precedence.
    """

    items: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.items)

    def __str__(self) -> str:
        return ",".join(f"{pattern}={bits:g}" for pattern, bits in self.items)

    @classmethod
    def of(cls, items: Mapping[str, Any]) -> Overrides:
        """Return overrides from bits by pattern.

        Raises:
            OverrideError: a pattern is malformed, or a value is no number of bits.
        """
        found = tuple((str(pattern).strip(), _bits(str(pattern), bits)) for pattern, bits in items.items())
        for pattern, _ in found:
            _alternatives(pattern)
        return cls(found)

    @classmethod
    def parse(cls, text: str) -> Overrides:
        """Parse `pattern=bits` pairs, separated by commas or lines; `#` starts a comment.

        Raises:
            OverrideError: the text is malformed.
        """
        items: dict[str, str] = {}
        lines = "\n".join(line.partition("#")[0] for line in text.splitlines())
        for part in filter(None, map(str.strip, _SEPARATORS.split(lines))):
            pattern, separator, bits = part.rpartition("=") if "=" in part else part.rpartition(":")
            pattern = pattern.strip().strip("'\"")
            if not separator or not pattern:
                raise OverrideError(f"bits by name are pattern=bits pairs, not '{part}'")
            if pattern in items:
                raise OverrideError(f"bits by name have the pattern '{pattern}' twice")
            items[pattern] = bits
        return cls.of(items)


def is_by_name(bits: object) -> bool:
    """Return whether a value of the setting `bits` holds bits by name, or names a file of them."""
    if isinstance(bits, Mapping | Overrides | PathLike):
        return True
    if not isinstance(bits, str):
        return False
    return "=" in bits or bits.startswith("@") or (not _NUMBER.fullmatch(bits) and Path(bits).is_file())


def split_bits(bits: Any) -> tuple[Any, Overrides]:
    """Split a value of the setting `bits` into the method's own bits, or None, and the bits by name.

    Args:
        bits: a plain value; `pattern=bits` pairs, after a plain value if there is one (`4,down_proj=8`); a mapping of
            patterns to bits; or a file of such pairs, as a path or as `@FILE`.

    Raises:
        OverrideError: the pairs are malformed.
        TextError: the file cannot be read.
    """
    if not is_by_name(bits):
        return bits, Overrides()
    if isinstance(bits, Overrides):
        return None, bits
    if isinstance(bits, Mapping):
        return None, Overrides.of(bits)
    text = fspath(bits)
    if "=" not in text:
        return None, Overrides.parse(read_text(Path(text.removeprefix("@"))))
    first, *rest = _SEPARATORS.split(text, maxsplit=1)
    if "=" in first or ":" in first:
        return None, Overrides.parse(text)
    return first.strip(), Overrides.parse("".join(rest))


def _bits(pattern: str, given: Any) -> float:
    text = str(given).strip()
    if isinstance(given, bool) or not _NUMBER.fullmatch(text) or not 0 < float(text) <= UNPACKED:
        raise OverrideError(f"'{pattern}={text}': bits must be a number above 0 and at most 16, which leaves unpacked")
    return float(text)


def _alternatives(pattern: str) -> list[tuple[str, ...]]:
    """Return the patterns that the braces of a pattern expand to, as components.

    Raises:
        OverrideError: braces are malformed, or a component is empty.
    """
    texts, choices, count = _BRACES.split(pattern)[::2], [], 1
    for inside in _BRACES.findall(pattern):
        if match := _RANGE.fullmatch(inside):
            numbers = range(int(match[1]), int(match[2]) + 1)
            count *= max(len(numbers), 1)
            choices.append([str(number) for number in numbers[:MOST_ALTERNATIVES]])
        else:
            choices.append([part.strip() for part in inside.split(",")])
            count *= len(choices[-1])
    if any(set("{}") & set(text) for text in texts) or count > MOST_ALTERNATIVES or not all(choices):
        raise OverrideError(f"'{pattern}': braces hold a range such as {{0..3}}, or a list such as {{a,b}}")
    found = []
    for chosen in product(*choices):
        joined = "".join(text + part for text, part in zip(texts, (*chosen, ""), strict=True))
        found.append(tuple(joined.removesuffix(".weight").split(".")))
    if not all(all(components) for components in found):
        raise OverrideError(f"'{pattern}' has an empty component between its dots")
    return found


@dataclass(frozen=True)
class Named:
    """A tensor that patterns may match.

    Attributes:
        name: name of the packed tensor.
        names: other names of the whole tensor.
        experts: for each matrix, the names of this matrix alone.
        packed: whether the method packs the tensor without overrides.
    """

    name: str
    names: tuple[str, ...]
    experts: tuple[tuple[str, ...], ...] = ((),)
    packed: bool = True

    def whole(self) -> Iterator[tuple[str, ...]]:
        """Yield the components of each name of the whole tensor."""
        return map(_components, (self.name, *self.names))


def _components(name: str) -> tuple[str, ...]:
    return tuple(name.removesuffix(".weight").split("."))


@dataclass
class _Pattern:
    """A pattern and what it matched.

    Attributes:
        text: as given.
        bits: its bits.
        alternatives: components of each expansion.
        found: by tensor name, the matched experts.
        matched: expansions that matched something.
    """

    text: str
    bits: float
    alternatives: list[tuple[str, ...]]
    found: dict[str, set[int]] = field(default_factory=dict)
    matched: set[tuple[str, ...]] = field(default_factory=set)

    def match(self, tensor: Named) -> None:
        """Record which experts of a tensor match."""
        experts: set[int] = set()
        whole = list(tensor.whole())
        for alternative in self.alternatives:
            if any(_occurs(alternative, name) for name in whole):
                hits = set(range(len(tensor.experts)))
            else:
                hits = {
                    number
                    for number, names in enumerate(tensor.experts)
                    if any(_occurs(alternative, _components(name)) for name in names)
                }
            if hits:
                self.matched.add(alternative)
                experts |= hits
        if experts:
            self.found[tensor.name] = experts


def _occurs(pattern: tuple[str, ...], name: tuple[str, ...]) -> bool:
    """Return whether the components of a pattern occur in a name, in sequence."""
    return any(
        all(fnmatchcase(part, wanted) for part, wanted in zip(name[start:], pattern, strict=False))
        for start in range(len(name) - len(pattern) + 1)
    )


def decide(overrides: Overrides, tensors: Sequence[Named]) -> dict[str, tuple[float | None, ...]]:
    """Return the bits of each matrix of every tensor that a pattern decides; None where no pattern does.

    A pattern also packs tensors that the method would leave unpacked if it matches no others.

    Raises:
        OverrideError: a pattern matches nothing, or only what earlier patterns decide.
    """
    patterns = [_Pattern(text, bits, _alternatives(text)) for text, bits in overrides.items]
    for pattern in patterns:
        for tensor in tensors:
            pattern.match(tensor)
        _refuse_unmatched(pattern, tensors)
    packed = {tensor.name for tensor in tensors if tensor.packed}
    patterns.sort(key=lambda pattern: pattern.bits != UNPACKED or pattern.text == ALL)
    bits: dict[str, list[float | None]] = {tensor.name: [None] * len(tensor.experts) for tensor in tensors}
    deciding: dict[str, set[str]] = {}
    for pattern in patterns:
        found = set(pattern.found)
        if pattern.bits != UNPACKED:
            found = found & packed or found
        left = False
        for name in found:
            for expert in pattern.found[name]:
                if bits[name][expert] is None:
                    bits[name][expert], left = pattern.bits, True
                    deciding.setdefault(name, set()).add(pattern.text)
        if not left and pattern.text != ALL:
            earlier = sorted({text for name in found for text in deciding.get(name, ())})
            raise OverrideError(
                f"'{pattern.text}={pattern.bits:g}' has no effect: the first pattern that matches decides (those with "
                f"16 bits first), and everything that it matches is decided by {', '.join(earlier)}; put it first"
            )
    return {name: tuple(own) for name, own in bits.items() if any(each is not None for each in own)}


def _refuse_unmatched(pattern: _Pattern, tensors: Sequence[Named]) -> None:
    """Raise OverrideError if an expansion of a pattern matches nothing; the message lists near misses."""
    lost = next((each for each in pattern.alternatives if each not in pattern.matched), None)
    if lost is None:
        return
    text, length = ".".join(lost), len(lost)
    runs: dict[str, None] = {}
    for tensor in tensors:
        names = [*tensor.whole(), *(_components(name) for names in tensor.experts for name in names)]
        for name in names:
            for start in range(len(name) - length + 1):
                run = ".".join(name[start : start + length])
                if not run.isdecimal():
                    runs[run] = None
    near = get_close_matches(text, [*runs][:20_000], NEAR, 0.5)
    given = "" if text == pattern.text else f"'{text}' of "
    nearest = f"; the nearest names are {', '.join(near)}" if near else "; `moepack inspect` lists the names"
    raise OverrideError(f"{given}'{pattern.text}={pattern.bits:g}' matches no tensor of the model{nearest}")
