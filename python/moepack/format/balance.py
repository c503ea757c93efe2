"""Factors between the tensors of a packed directory and those of its source (docs/format.md).

A directory that was packed from the balanced form of a checkpoint (`moepack.checkpoint.balanced`) computes the source's
function with other scales. Running it needs no factors. Adapters, decoded models and comparisons of
weights need them, because they combine it with tensors in the source's scales.

The value of a source's weight is stored / rows * columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moepack.errors import CorruptionError, LoadError
from moepack.format.directory import read_manifest
from moepack.format.header import read_header
from moepack.format.hub import BALANCE
from moepack.format.manifest import Manifest

__all__ = ["SAME", "Balance", "balance_of", "key_of", "serialized"]

ROWS, COLUMNS = "rows", "columns"
_EQUAL = "equal"
"""The key of the metadata that maps names to the names of equal factors."""


@dataclass(frozen=True)
class Balance:
    """The factors of a directory; empty if its tensors have the source's scales.

    Attributes:
        factors: by key (`key_of`, or a tensor's name) followed by `.rows` or `.columns`: [R] and [C] of a matrix or
            vector, or of all experts; otherwise [E, R] and [E, C] of experts.
    """

    factors: Mapping[str, Tensor]

    def __bool__(self) -> bool:
        return bool(self.factors)

    def __contains__(self, key: object) -> bool:
        return f"{key}.{ROWS}" in self.factors or f"{key}.{COLUMNS}" in self.factors

    @property
    def keys(self) -> list[str]:
        """The keys, sorted."""
        return sorted({name.rpartition(".")[0] for name in self.factors})

    def only(self, keys: Iterable[str]) -> Balance:
        """Return the factors of some keys."""
        wanted = set(keys)
        return Balance({name: found for name, found in self.factors.items() if name.rpartition(".")[0] in wanted})

    def rows(self, key: str) -> Tensor | None:
        """Return by what rows, or entries of a vector, were multiplied, float32; None for 1."""
        found = self.factors.get(f"{key}.{ROWS}")
        return None if found is None else found.float()

    def columns(self, key: str) -> Tensor | None:
        """Return by what columns were divided, float32; None for 1."""
        found = self.factors.get(f"{key}.{COLUMNS}")
        return None if found is None else found.float()

    def restored(self, key: str, values: Tensor) -> Tensor:
        """Return stored values [..., R, C] or [n] in the source's scales, in their dtype."""
        rows, columns = self.rows(key), self.columns(key)
        found = values if rows is None and columns is None else values.float()
        if rows is not None:
            rows = rows.to(values.device)
            found = found / (rows if values.ndim == 1 else rows[..., None])
        if columns is not None:
            found = found * columns.to(values.device)[..., None, :]
        return found.to(values.dtype)


SAME = Balance({})
"""The factors of a directory in the source's scales."""


def key_of(manifest: Manifest, name: str) -> str:
    """Return the key of a packed tensor: module and projection of experts, otherwise the tensor's name."""
    record = manifest.tensors[name]
    return f"{record.module}.{record.projection}" if record.experts else name


def serialized(factors: Mapping[str, Tensor]) -> bytes:
    """Return the content of the file. Equal factors are stored once; the metadata gives the others' names as JSON."""
    stored: dict[str, Tensor] = {}
    known: dict[tuple[object, ...], str] = {}
    others: dict[str, str] = {}
    for name, tensor in sorted(factors.items()):
        content = tensor.contiguous()
        key = content.dtype, *content.shape, content.view(torch.uint8).numpy().tobytes()
        if (first := known.setdefault(key, name)) == name:
            stored[name] = content.clone()
        else:
            others[name] = first
    # One key only: the order of several is random.
    data: bytes = save(stored, {_EQUAL: json.dumps(others, sort_keys=True)})
    return data


def balance_of(directory: Path) -> Balance:
    """Read the factors of a packed directory.

    Raises:
        CorruptionError: the file is damaged.
        LoadError: the file is missing.
    """
    file = directory / BALANCE
    if BALANCE not in read_manifest(directory).files:
        return SAME
    if not file.is_file():
        message = "is missing; download it, because it contains the factors between the packed and the original weights"
        raise LoadError(message, file=file)
    return _read(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read(file: Path, _: int) -> Balance:
    read_header(file, CorruptionError)
    try:
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            others = json.loads((opened.metadata() or {}).get(_EQUAL, "{}"))
            found |= {name: found[first] for name, first in others.items()}
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError) as error:
        raise CorruptionError(f"is not a file of factors: {error}", file=file) from error
    for name, tensor in found.items():
        ends = name.rpartition(".")[2] in (ROWS, COLUMNS)
        if not ends or not tensor.is_floating_point() or not bool(((tensor > 0) & tensor.isfinite()).all()):
            raise CorruptionError("is not a vector of positive factors", file=file, tensor=name)
    return Balance(found)
