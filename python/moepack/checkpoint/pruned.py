"""A checkpoint with fewer experts: some are left out, or merged into others. Nothing is written.

The rows of the routers, and their correction biases, go with the experts, and config.json names the new number. Each
remaining expert is the mean of a group of original ones, which is a single expert if none are merged; its router rows
are those of the group's first. The order of the experts does not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.checkpoint.architectures import described
from moepack.checkpoint.model import MoeLayer, MoeModel
from moepack.checkpoint.reader import Checkpoint
from moepack.errors import UnsupportedModelError
from moepack.format.header import TensorInfo

__all__ = ["Group", "PrunedCheckpoint", "expert_keys", "refuse_unprunable", "remaining", "routing_groups"]

Group = tuple[tuple[int, float], ...]
"""The original experts of a remaining one, and their shares, which sum to 1."""


@dataclass(frozen=True)
class _Origin:
    """How a tensor is computed.

    Attributes:
        sources: the original tensors of each member of a group, for a tensor of one expert; one name otherwise.
        groups: the groups that a tensor with a first axis of experts keeps; empty for a tensor of one expert.
        shares: the shares of `sources`.
        rows: whether only the first member of each group counts, as for routers.
    """

    sources: tuple[str, ...]
    groups: tuple[Group, ...] = ()
    shares: tuple[float, ...] = (1.0,)
    rows: bool = False


class PrunedCheckpoint(Checkpoint):
    """A checkpoint whose sparse layers keep some of their experts."""

    def __init__(self, original: Checkpoint, model: MoeModel, groups: Mapping[str, Sequence[Group]]) -> None:
        """Apply a pruning.

        Args:
            original: the checkpoint.
            model: its description.
            groups: by layer, the groups of the remaining experts; equally many in every layer.

        Raises:
            UnsupportedModelError: see `refuse_unprunable`.
        """
        refuse_unprunable(original, model)
        count = len(next(iter(groups.values())))
        config = _resized(original.config, expert_keys(original.config, model.layers[0].experts), count)
        super().__init__(original.path, config, original.shards, original.files)
        self.original, self.notes, self.groups = original, original.notes, groups
        self._origins: dict[str, _Origin] = {}
        gone: set[str] = set()
        for layer in model.layers:
            gone |= self._prune(layer, tuple(groups[layer.name]))
        names = (name for name in original.names() if name not in gone)
        self._tensors = {name: self._described(name) for name in names}

    def _prune(self, layer: MoeLayer, groups: tuple[Group, ...]) -> set[str]:
        """Record the origins of a layer's tensors; return those of experts that are gone."""
        gone: set[str] = set()
        for name in _stacked(self.original, layer):
            self._origins[name] = _Origin((name,), groups)
        for name in layer.router:
            shape = self.original.info(name).shape
            if shape and shape[0] == layer.experts:
                self._origins[name] = _Origin((name,), groups, rows=True)
            elif layer.experts in shape:
                raise UnsupportedModelError(
                    f"has shape {list(shape)}: its experts are not rows, so it cannot be pruned",
                    file=self.original.info(name).file,
                    tensor=name,
                )
        places = _places(layer)
        owned = {place: [n for n in self.original.names() if n.startswith(f"{place}.")] for place in places}
        for number, place in enumerate(places):
            if number >= len(groups):
                gone |= {*owned[place]}
                continue
            members = [(places[expert], share) for expert, share in groups[number]]
            for name in owned[place]:
                sources = tuple(f"{other}{name.removeprefix(place)}" for other, _ in members)
                self._origins[name] = _Origin(sources, (), tuple(share for _, share in members))
        return gone

    def _described(self, name: str) -> TensorInfo:
        origin = self._origins.get(name)
        if origin is None:
            return self.original.info(name)
        info = self.original.info(origin.sources[0])
        shape = (len(origin.groups), *info.shape[1:]) if origin.groups else info.shape
        return replace(info, name=name, shape=shape, nbytes=prod(shape) * info.dtype.itemsize)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor. Errors as for the original's `tensor`."""
        self.info(name)
        origin = self._origins.get(name)
        if origin is None:
            return self.original.tensor(name)
        if origin.rows:
            return self.original.tensor(name)[[group[0][0] for group in origin.groups]]
        if origin.groups:
            return torch.stack([self.part(name, number) for number in range(len(origin.groups))])
        members = zip(origin.sources, origin.shares, strict=True)
        return _mean([(self.original.tensor(source), share) for source, share in members])

    def part(self, name: str, expert: int) -> Tensor:
        """Return one matrix of a tensor that stacks experts. Errors as for the original's `part`."""
        origin = self._origins.get(name)
        if origin is None or not origin.groups:
            return self.tensor(name)[expert] if origin else self.original.part(name, expert)
        return _mean([(self.original.part(name, source), share) for source, share in origin.groups[expert]])

    def stored_bytes(self, name: str) -> int:
        """Return the stored bytes of the part of the original that a tensor is computed from. Errors as for `info`."""
        info, origin = self.info(name), self._origins.get(name)
        if origin is None:
            return self.original.stored_bytes(name)
        before = self.original.info(origin.sources[0])
        return self.original.stored_bytes(origin.sources[0]) * prod(info.shape) // max(prod(before.shape), 1)

    @property
    def stored(self) -> int:
        """Stored bytes of all tensors of the original."""
        return self.original.stored

    def stored_infos(self, name: str) -> tuple[TensorInfo, ...]:
        """Return the places of the stored tensors of the original. Errors as for `info`."""
        self.info(name)
        sources = self._origins[name].sources if name in self._origins else (name,)
        return tuple(info for source in sources for info in self.original.stored_infos(source))

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the tensor's bytes in the dtype of `info`."""
        if name not in self._origins:
            return self.original.raw(name)
        value = self.tensor(name).to(self.info(name).dtype).contiguous()
        data: npt.NDArray[np.uint8] = value.reshape(-1).view(torch.uint8).numpy()
        return data

    def fingerprint(self) -> str:
        """Return the original's fingerprint and a digest of the remaining experts."""
        digest = hashlib.sha256(repr({name: list(own) for name, own in sorted(self.groups.items())}).encode())
        return f"{self.original.fingerprint()}+pruned-{digest.hexdigest()}"


def _mean(parts: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return the weighted mean of tensors in their dtype; a single one unchanged."""
    first = parts[0][0]
    if len(parts) == 1:
        return first
    total = sum((tensor.float() * share for tensor, share in parts), torch.zeros(()))
    return total.to(first.dtype)


def remaining(config: Mapping[str, Any], model: MoeModel, share: float) -> int:
    """Return how many experts of a layer remain if a share of them goes.

    Raises:
        UnsupportedModelError: none would go, or fewer would remain than a token chooses, or the router chooses among
            groups of experts that would break.
    """
    experts, top_k = model.layers[0].experts, described(model.architecture).top_k(config)
    kept = experts - int(experts * share + 1e-9)
    where = f"pruning {share:.4g} of {experts} experts"
    if kept == experts:
        raise UnsupportedModelError(f"{where} leaves out none; the least is {1 / experts:.4g}")
    if kept < top_k:
        raise UnsupportedModelError(f"{where} leaves {kept}, fewer than the {top_k} that a token chooses")
    groups, chosen = _routing_groups(config)
    if groups > 1 and (kept % groups or kept // groups * chosen < top_k or kept // groups < 2):
        least = max(-(-top_k // chosen), 2)
        raise UnsupportedModelError(
            f"{where} leaves {kept}, but its router chooses among {groups} groups of equal size, each of which must "
            f"keep at least {least}; prune a multiple of {groups / experts:.4g}"
        )
    return kept


def _routing_groups(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of groups among which a router chooses first, and how many it chooses; 1 and 1 without."""
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        groups = part.get("n_group") or part.get("n_groups") or 1
        if isinstance(groups, int) and groups > 1:
            chosen = part.get("topk_group") or part.get("topk_groups") or 1
            return groups, chosen if isinstance(chosen, int) else 1
    return 1, 1


def routing_groups(config: Mapping[str, Any]) -> int:
    """Return the number of groups of experts among which a router chooses first; 1 if it has none."""
    return _routing_groups(config)[0]


def refuse_unprunable(checkpoint: Checkpoint, model: MoeModel) -> None:
    """Check that moepack can leave experts of a model out.

    Raises:
        UnsupportedModelError: it cannot.
    """
    counts = {layer.experts for layer in model.layers}
    reason = ""
    if len(counts) > 1:
        reason = f"its layers have different numbers of experts ({', '.join(map(str, sorted(counts)))})"
    elif model.beyond:
        reason = "its multi-token-prediction layers have experts, which no text reaches"
    elif not expert_keys(checkpoint.config, next(iter(counts))):
        reason = f"config.json has no number of experts that is {next(iter(counts))}"
    elif any(not layer.router for layer in model.layers):
        reason = "a layer has no router of its own"
    if reason:
        raise UnsupportedModelError(f"experts cannot be left out: {reason}", file=checkpoint.path / "config.json")


def expert_keys(config: Mapping[str, Any], experts: int) -> list[tuple[str, ...]]:
    """Return the paths of the entries of config.json that are the number of experts."""
    found: list[tuple[str, ...]] = []
    for key, value in config.items():
        if isinstance(value, dict):
            found += [(key, *path) for path in expert_keys(value, experts)]
        elif value == experts and type(value) is int and "expert" in key and not any(w in key for w in _OTHERS):
            found.append((key,))
    return found


_OTHERS = ("per_tok", "top", "shared", "capacity", "group", "layer", "size", "dim")
"""Parts of names of entries that have other numbers of experts."""


def _resized(config: Mapping[str, Any], keys: Sequence[tuple[str, ...]], count: int) -> dict[str, Any]:
    """Return a copy of config.json with another number of experts."""
    found = dict(config)
    for first, *rest in keys:
        inner = [(*rest,)] if rest else []
        found[first] = _resized(found[first], inner, count) if rest else count
    return found


def _stacked(checkpoint: Checkpoint, layer: MoeLayer) -> list[str]:
    """Return the tensors that stack all experts of a layer: matrices, and what lies beside them with as many rows.

    Raises:
        UnsupportedModelError: a tensor stacks experts along another axis.
    """
    matrices = {part.tensor for projection in layer.projections for part in projection.parts if part.index}
    for name in matrices:
        info = checkpoint.info(name)
        if info.shape[0] != layer.experts:
            raise UnsupportedModelError(
                "stacks its experts in rows, so it cannot be pruned", file=info.file, tensor=name
            )
    places = {name.rpartition(".")[0] for name in matrices}
    beside = (name for name in checkpoint.names() if name.rpartition(".")[0] in places and name not in layer.router)
    return [name for name in beside if checkpoint.info(name).shape[:1] == (layer.experts,)]


def _places(layer: MoeLayer) -> list[str]:
    """Return the path of each expert's tensors; none if tensors stack experts."""
    parts = layer.projections[0].parts
    if any(part.index for part in parts) or len(parts) < 2:
        return []
    first, second = (part.tensor.split(".") for part in parts[:2])
    end = next(number for number, (one, other) in enumerate(zip(first, second, strict=True)) if one != other) + 1
    return [".".join(part.tensor.split(".")[:end]) for part in parts]
