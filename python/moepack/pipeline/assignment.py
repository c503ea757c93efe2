"""Assigns a method to each tensor of a job.

A job has one main method. Individual tensors may use another method, or may come already packed, for example from
another machine or an earlier job. This module combines all methods of a job: which tensors are packed, and what
calibration must record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moepack.calibration import CalibrationRequest, Weights
from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint, DenseLayer, MoeModel, describe
from moepack.checkpoint.balanced import balanced
from moepack.checkpoint.dense import position
from moepack.methods import Method, PackedTensor, create
from moepack.registry import open_tensor

__all__ = ["Assignment"]


@dataclass(frozen=True)
class Assignment:
    """The methods of a job.

    Attributes:
        method: packs experts, linear layers of its roles, and every other tensor that is not in `others`.
        others: maps a packed tensor's name to the method that packs it, or to the packed tensor itself.
    """

    method: Method
    others: Mapping[str, Method | PackedTensor] = field(default_factory=dict)

    @property
    def methods(self) -> list[Method]:
        """The distinct methods, the main method first."""
        found = [self.method]
        for other in self.others.values():
            if isinstance(other, Method) and not any(other is known for known in found):
                found.append(other)
        return found

    def of(self, weights: Weights) -> Method | PackedTensor:
        """Return the method that packs a tensor, or the tensor already packed."""
        return self.others.get(weights.name, self.method)

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration that the methods need; None if no method uses calibration.

        Raises:
            ValueError: two methods need different calibrations, but the model runs only once.
        """
        requests = [request for method in self.methods if (request := method.request) is not None]
        if any(request != requests[0] for request in requests):
            raise ValueError("all methods of a job must use the same calibration set and the same calibration settings")
        return requests[0] if requests else None

    def layers(self, model: MoeModel) -> list[PackedLayer]:
        """Return the layers to pack, in execution order. The linear layers of a block precede its experts.

        Raises:
            CorruptionError: a packed tensor in `others` violates its format.
            UnsupportedModelError: the main method cannot pack the model's experts.
            ValueError: `others` names an unknown tensor, or assigns an unsuitable method or packed tensor.
        """
        roles = self.method.dense_roles
        dense = (
            DenseLayer(layer.name, tuple(x for x in layer.linears if x.role in roles or x.source in self.others))
            for layer in model.dense
        )
        experts = map(self.method.arranged, model.layers)
        beyond = (layer for layer in model.beyond if any(x.packed_name in self.others for x in layer.projections))
        layers: list[PackedLayer] = [*(layer for layer in dense if layer.linears), *experts, *beyond]
        layers.sort(key=lambda layer: position(layer.name))
        tensors = {weights.name: weights for layer in layers for weights in layer_tensors(layer).values()}
        if unknown := self.others.keys() - tensors.keys():
            raise ValueError(f"no tensor '{min(unknown)}' can be packed")
        for name in self.others:
            self._check(tensors[name])
        return layers

    def with_beyond(self, model: MoeModel, bits: int | None) -> Assignment:
        """Also pack the multi-token-prediction experts, which transformers' model lacks, as group-wise integers.

        These experts are rounded to nearest, without calibration.

        Raises:
            ValueError: the model has no such experts, or `finequant` does not support `bits`.
        """
        if bits is None:
            return self
        if not model.beyond:
            raise ValueError("the model has no multi-token-prediction experts to pack")
        method = create("finequant", bits=bits)
        names = (part.packed_name for layer in model.beyond for part in layer.projections)
        return replace(self, others={**dict.fromkeys(names, method), **self.others})

    def _check(self, weights: Weights) -> None:
        """Raise ValueError if the assigned method or packed tensor does not fit the tensor."""
        chosen = self.of(weights)
        if isinstance(chosen, PackedTensor):
            opened = open_tensor(chosen.data, tensor=weights.name)
            if (*opened.shape, opened.ndim) != (*weights.shape, weights.ndim):
                raise ValueError(
                    f"'{weights.name}' has shape {list(weights.shape)}, but the packed tensor has another shape"
                )
            return
        if weights.role != "experts" and weights.role not in chosen.dense_roles:
            raise ValueError(f"the method {chosen.name} does not pack '{weights.name}' ({weights.role})")
        if chosen.rewrites and chosen is not self.method:
            raise ValueError(
                f"the method {chosen.name} changes the whole checkpoint and cannot pack only '{weights.name}'"
            )

    def balanced(self, checkpoint: Checkpoint, model: MoeModel) -> tuple[Checkpoint, MoeModel]:
        """Return the balanced form of a checkpoint and its description, if a method needs it.

        Tensors in `others` that were packed from the checkpoint as it is keep their scales, and so does what they share
        scales with.

        Raises:
            ValueError: of two packed tensors that share scales, only one was packed from the balanced form.
        """
        if not any(method.needs_balance for method in self.methods):
            return checkpoint, model
        tensors = [weights for layer in self.layers(model) for weights in layer_tensors(layer).values()]
        packed = {source for weights in tensors for source in weights.sources}
        given = [weights for weights in tensors if isinstance(self.of(weights), PackedTensor)]
        form, kept = balanced(checkpoint, model, packed), set[str]()
        if form is not None and given:
            before = self._unlike(given, self._described(form, model))
            kept = {source for weights in before for source in weights.sources}
            form = balanced(checkpoint, model, packed, kept) if kept else form
        if form is None:
            return checkpoint, model
        described = self._described(form, model)
        for weights in self._unlike([each for each in given if kept.isdisjoint(each.sources)], described):
            raise ValueError(f"'{weights.name}' was packed in other scales than a packed tensor that shares them")
        return form, described

    @staticmethod
    def _described(form: Checkpoint, model: MoeModel) -> MoeModel:
        return replace(describe(form), notes=model.notes)

    def _unlike(self, given: Sequence[Weights], model: MoeModel) -> list[Weights]:
        """Return the weights whose packed tensors are nearer to them than to the same weights of another form."""
        others = {each.name: each for layer in self.layers(model) for each in layer_tensors(layer).values()}
        found = []
        for weights in given:
            packed = self.of(weights)
            assert isinstance(packed, PackedTensor)
            values = torch.from_numpy(open_tensor(packed.data).dequantize()[0])
            distances = [float((each.expert(0).float() - values).norm()) for each in (weights, others[weights.name])]
            if distances[0] < distances[1]:
                found.append(weights)
        return found

    def decided(self, weights: Weights) -> Any:
        """Return what was decided in advance for a tensor, or the identity of its packed tensor."""
        chosen = self.of(weights)
        return _identity(chosen) if isinstance(chosen, PackedTensor) else chosen.decided(weights.name)

    def bound(self, layer: PackedLayer) -> int:
        """Return the maximum packed size of a layer in bytes."""
        total = 0
        for weights in layer_tensors(layer).values():
            chosen = self.of(weights)
            if isinstance(chosen, PackedTensor):
                total += chosen.data.nbytes
            else:
                total += chosen.bound(weights.shape, weights.role)
        return total

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the main method, plus the assignments of all other tensors."""
        if not self.others:
            return dict(self.method.settings)
        return {**self.method.settings, "assigned": {name: _identity(x) for name, x in sorted(self.others.items())}}


def _identity(other: Method | PackedTensor) -> str:
    """Return a string that identifies a method with its settings, or a packed tensor, for the job's fingerprint."""
    if isinstance(other, PackedTensor):
        return f"{other.kind} {hashlib.sha256(other.data.data).hexdigest()}"
    return f"{other.name} " + ", ".join(f"{key}={value}" for key, value in sorted(other.settings.items()))
