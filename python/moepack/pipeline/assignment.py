"""Assigns a method to each tensor of a job.

A job has one main method. Individual tensors may use another method, or may come already packed, for example from
another machine or an earlier job. This module combines all methods of a job: which tensors are packed, and what
calibration must record. An `Assignment` knows settings only; `Assignment.planned` adds the methods' plans for a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moepack.calibration import CalibrationRequest, Weights
from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint, DenseLayer, MoeModel, describe
from moepack.checkpoint.balanced import balanced, knows_norms
from moepack.checkpoint.dense import position
from moepack.methods import Method, MethodPlan, PackedBytes, Rearranges, Rewrites, create
from moepack.methods.mixins import linear_roles
from moepack.methods.pinned import pinned, without
from moepack.methods.request import DefaultText, readable
from moepack.progress import Progress
from moepack.registry import open_tensor
from moepack.textfile import NO_TEXT

__all__ = ["Assignment", "PlannedAssignment"]

KEPT_SCALES = (
    "moepack does not know which layers read the norms of '{}' models, so norms keep their scales. The loss of every "
    "method except auto and rate therefore depends on these scales."
)
"""A note; takes the architecture."""


@dataclass(frozen=True)
class Assignment:
    """The methods of a job.

    Attributes:
        method: packs experts, linear layers of its roles, and every other tensor that is not in `others`.
        others: maps a packed tensor's name to the method that packs it, or to the packed tensor itself.
    """

    method: Method
    others: Mapping[str, Method | PackedBytes] = field(default_factory=dict)

    @property
    def methods(self) -> list[Method]:
        """The distinct methods, the main method first."""
        found = [self.method]
        for other in self.others.values():
            if isinstance(other, Method) and not any(other is known for known in found):
                found.append(other)
        return found

    def of(self, weights: Weights) -> Method | PackedBytes:
        """Return the method that packs a tensor, or the tensor already packed."""
        return self.others.get(weights.name, self.method)

    def layers(self, model: MoeModel) -> list[PackedLayer]:
        """Return the layers to pack, in execution order. The linear layers of a block precede its experts.

        Raises:
            CorruptionError: a packed tensor in `others` violates its format.
            UnsupportedModelError: the main method cannot pack the model's experts.
            ValueError: `others` names an unknown tensor, or assigns an unsuitable method or packed tensor.
        """
        roles = linear_roles(self.method)
        dense = (
            DenseLayer(layer.name, tuple(x for x in layer.linears if x.role in roles or x.source in self.others))
            for layer in model.dense
        )
        experts = map(self.method.arrange, model.layers) if isinstance(self.method, Rearranges) else model.layers
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
        method = create("finequant", bits=bits, calibration=NO_TEXT)
        names = (part.packed_name for layer in model.beyond for part in layer.projections)
        return replace(self, others={**dict.fromkeys(names, method), **self.others})

    def with_overrides(self, checkpoint: Checkpoint, model: MoeModel) -> tuple[Assignment, MoeModel]:
        """Apply the main method's bits by name, and drop the built-in text where the model cannot run on it.

        Returns:
            The assignment; and the model without the tensors that stay unpacked, with a note on a text that is dropped.

        Raises:
            OverrideError: a pattern matches nothing or has no effect, or the method cannot give a tensor the bits.
        """
        found = {id(method): readable(method, checkpoint, model) for method in self.methods}
        others = {name: found.get(id(other), other) for name, other in self.others.items()}
        unread = dict.fromkeys(one.unread for one in found.values() if isinstance(one, DefaultText) and one.unread)
        model = replace(model, notes=(*model.notes, *unread))
        method = pinned(found[id(self.method)], checkpoint, model)
        if method.pinned is None:
            return Assignment(method, others), model
        return Assignment(method, {**method.pinned.methods, **others}), without(model, method.pinned.unpacked)

    def described(self, checkpoint: Checkpoint, notes: tuple[str, ...]) -> MoeModel:
        """Describe a changed form of the checkpoint as the original was; `notes` replace those of the description."""
        found = replace(describe(checkpoint), notes=notes)
        return found if self.method.pinned is None else without(found, self.method.pinned.unpacked)

    def _check(self, weights: Weights) -> None:
        """Raise ValueError if the assigned method or packed tensor does not fit the tensor."""
        chosen = self.of(weights)
        if isinstance(chosen, PackedBytes):
            opened = open_tensor(chosen.data, tensor=weights.name)
            if (*opened.shape, opened.ndim) != (*weights.shape, weights.ndim):
                raise ValueError(
                    f"'{weights.name}' has shape {list(weights.shape[-weights.ndim :])}, but the packed tensor has "
                    f"shape {list(opened.shape[-opened.ndim :])}"
                )
            return
        if weights.role != "experts" and weights.role not in linear_roles(chosen):
            raise ValueError(f"the method {chosen.name} does not pack '{weights.name}' ({weights.role})")
        if isinstance(chosen, Rewrites) and chosen.rewrites and chosen is not self.method:
            raise ValueError(
                f"the method {chosen.name} changes the whole checkpoint and cannot pack only '{weights.name}'"
            )

    def balanced(self, checkpoint: Checkpoint, model: MoeModel) -> tuple[Checkpoint, MoeModel]:
        """Return the balanced form of a checkpoint, and its description, if a method needs it; otherwise the original.

        If norms keep their scales, a note says so. Experts after the last layer keep their scales.

        Tensors in `others` that were packed from the original checkpoint keep their scales, and so do tensors that
        share scales with them.

        Raises:
            ValueError: of two packed tensors that share scales, only one was packed from the balanced form.
        """
        beyond = {layer.name for layer in model.beyond}
        layers = (layer for layer in self.layers(model) if layer.name not in beyond)
        tensors = [weights for layer in layers for weights in layer_tensors(layer).values()]
        chosen = map(self.of, tensors)
        if not any(isinstance(method, Method) and method.needs_balance for method in chosen):
            return checkpoint, model
        if not knows_norms(model.architecture):
            model = replace(model, notes=(*model.notes, KEPT_SCALES.format(model.architecture)))
        packed = {source for weights in tensors for source in weights.sources}
        form = balanced(checkpoint, model, packed)
        if form is None:
            return checkpoint, model
        described = self.described(form, model.notes)
        given = [weights.name for weights in tensors if isinstance(self.of(weights), PackedBytes)]
        if not (plain := self._nearer(given, model, described)):
            return form, described
        kept = {source for weights in tensors if weights.name in plain for source in weights.sources}
        form = balanced(checkpoint, model, packed, kept)
        mixed = model if form is None else self.described(form, model.notes)
        if others := self._nearer([name for name in given if name not in plain], described, mixed):
            raise ValueError(
                f"'{others[0]}' and a packed tensor that shares its row or column scales were packed from different "
                "forms of the checkpoint; pack both again from the checkpoint"
            )
        return form or checkpoint, mixed

    def _nearer(self, names: Sequence[str], model: MoeModel, other: MoeModel) -> list[str]:
        """Return the tensors in `others` that are nearer to the weights of one form of a checkpoint than of another."""
        found = []
        forms = [
            {each.name: each for layer in self.layers(form) for each in layer_tensors(layer).values()}
            for form in ((model, other) if names else ())
        ]
        for name in names:
            packed = self.others[name]
            assert isinstance(packed, PackedBytes)
            values = torch.from_numpy(open_tensor(packed.data).dequantize()[0])
            near, far = (float((form[name].expert(0).float() - values).norm()) for form in forms)
            if near < far:
                found.append(name)
        return found

    def bound(self, layer: PackedLayer) -> int:
        """Return the maximum packed size of a layer in bytes, before plans are made."""
        return _bound(layer, self.of)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the main method, plus the assignments of all other tensors."""
        return self.with_others(self.method.settings)

    def with_others(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings of the main method plus the assignments of all other tensors."""
        pins = {} if self.method.pinned is None else self.method.pinned.methods
        assigned = {name: _identity(x) for name, x in sorted(self.others.items()) if x is not pins.get(name)}
        return {
            **settings,
            **({"overrides": str(self.method.overrides)} if self.method.overrides else {}),
            **({"assigned": assigned} if assigned else {}),
        }

    def planned(
        self,
        checkpoint: Checkpoint,
        model: MoeModel,
        progress: Progress | None = None,
        known: MethodPlan | None = None,
    ) -> PlannedAssignment:
        """Let all methods plan; raises as `Method.plan`.

        Args:
            checkpoint, model: the checkpoint to compress.
            progress: receives progress.
            known: a plan of the main method for this checkpoint, which is then not made again.
        """
        plans = {
            id(method): known if known and method is known.method else method.plan(checkpoint, model, progress)
            for method in self.methods
        }
        others = {name: plans[id(other)] if isinstance(other, Method) else other for name, other in self.others.items()}
        return PlannedAssignment(self, plans[id(self.method)], others)


@dataclass(frozen=True)
class PlannedAssignment:
    """The plans of a job's methods for one model.

    Attributes:
        assignment: the methods.
        plan: the plan of the main method.
        others: for a packed tensor's name, the plan of its method, or the packed tensor itself.
    """

    assignment: Assignment
    plan: MethodPlan
    others: Mapping[str, MethodPlan | PackedBytes] = field(default_factory=dict)

    @property
    def plans(self) -> list[MethodPlan]:
        """The distinct plans, that of the main method first."""
        found = [self.plan]
        for other in self.others.values():
            if isinstance(other, MethodPlan) and not any(other is known for known in found):
                found.append(other)
        return found

    def of(self, weights: Weights) -> MethodPlan | PackedBytes:
        """Return the plan that packs a tensor, or the tensor already packed."""
        return self.others.get(weights.name, self.plan)

    def layers(self, model: MoeModel) -> list[PackedLayer]:
        """See `Assignment.layers`."""
        return self.assignment.layers(model)

    @property
    def request(self) -> CalibrationRequest | None:
        """The calibration that the plans need; None if none uses calibration.

        Raises:
            ValueError: two methods need different calibrations, but the model runs only once.
        """
        requests = [plan.request for plan in self.plans if plan.request is not None]
        if any(request != requests[0] for request in requests):
            raise ValueError(
                "all methods of a job must use the same calibration set and the same calibration settings; methods "
                "that read the built-in text by default need calibration='none' beside others"
            )
        return requests[0] if requests else None

    @property
    def goal(self) -> int | None:
        """The requested size of all weight files in bytes, if there is one."""
        return None if self.plan.goal is None else self.plan.goal.nbytes

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the main method, plus the assignments of all other tensors."""
        return self.assignment.with_others(self.plan.settings)

    def decided(self, weights: Weights) -> Any:
        """Return what was decided in advance for a tensor, or the identity of its packed tensor."""
        chosen = self.of(weights)
        return _identity(chosen) if isinstance(chosen, PackedBytes) else chosen.decisions.get(weights.name)

    def bound(self, layer: PackedLayer) -> int:
        """Return the maximum packed size of a layer in bytes."""
        return _bound(layer, self.of)


def _bound(layer: PackedLayer, of: Callable[[Weights], Method | MethodPlan | PackedBytes]) -> int:
    total = 0
    for weights in layer_tensors(layer).values():
        chosen = of(weights)
        if isinstance(chosen, PackedBytes):
            total += chosen.data.nbytes
        else:
            packer = chosen.packer if isinstance(chosen, MethodPlan) else chosen
            total += packer.bound(weights.shape, weights.role)
    return total


def _identity(other: Method | PackedBytes) -> str:
    """Return a string that identifies a method with its settings, or a packed tensor, for the job's fingerprint."""
    if isinstance(other, PackedBytes):
        return f"{other.kind} {hashlib.sha256(other.data.data).hexdigest()}"
    return f"{other.name} " + ", ".join(f"{key}={value}" for key, value in sorted(other.settings.items()))
