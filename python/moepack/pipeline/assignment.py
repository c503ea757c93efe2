"""Which method packs which tensor of a job.

A job has one method; single tensors may be given to others, or come packed from elsewhere (another machine, an earlier
job). Everything that follows from the methods together is decided here: what is packed, and what calibration shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moepack.calibration import CalibrationRequest, Weights
from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import DenseLayer, MoeModel
from moepack.checkpoint.dense import position
from moepack.methods import Method, PackedTensor, create
from moepack.registry import open_tensor

__all__ = ["Assignment"]


@dataclass(frozen=True)
class Assignment:
    """The methods of a job.

    Attributes:
        method: packs every tensor that is not among `others`: experts, and linear layers of its roles.
        others: by the packed tensor's name, the method that packs it, or the packed tensor itself.
    """

    method: Method
    others: Mapping[str, Method | PackedTensor] = field(default_factory=dict)

    @property
    def methods(self) -> list[Method]:
        """The methods, each once, the job's own first."""
        found = [self.method]
        for other in self.others.values():
            if isinstance(other, Method) and not any(other is known for known in found):
                found.append(other)
        return found

    def of(self, weights: Weights) -> Method | PackedTensor:
        """What packs a tensor, or the packed tensor."""
        return self.others.get(weights.name, self.method)

    @property
    def request(self) -> CalibrationRequest | None:
        """What the methods must see of the running model; None if none looks at it.

        Raises:
            ValueError: two methods want to see different things; the model runs once.
        """
        requests = [request for method in self.methods if (request := method.request) is not None]
        if any(request != requests[0] for request in requests):
            raise ValueError(
                "the methods of a job must have the same calibration set and the same way to run the model"
            )
        return requests[0] if requests else None

    def layers(self, model: MoeModel) -> list[PackedLayer]:
        """What is packed, in the order of execution; the linear layers of a block come before its experts.

        Raises:
            CorruptionError: a packed tensor among `others` contradicts its format.
            UnsupportedModelError: the job's method cannot pack the model's experts.
            ValueError: `others` names a tensor that is not there, or gives one to what cannot stand for it.
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
            raise ValueError(f"there is no tensor '{min(unknown)}' to be packed")
        for name in self.others:
            self._check(tensors[name])
        return layers

    def with_beyond(self, model: MoeModel, bits: int | None) -> Assignment:
        """Pack the experts that transformers' model does not have, too: integers in groups, rounded without a text.

        Raises:
            ValueError: there are none, or the bits are none that `finequant` knows.
        """
        if bits is None:
            return self
        if not model.beyond:
            raise ValueError("there are no experts of multi-token prediction that could be packed")
        method = create("finequant", bits=bits)
        names = (part.packed_name for layer in model.beyond for part in layer.projections)
        return replace(self, others={**dict.fromkeys(names, method), **self.others})

    def _check(self, weights: Weights) -> None:
        """Refuse what cannot stand for a tensor."""
        chosen = self.of(weights)
        if isinstance(chosen, PackedTensor):
            opened = open_tensor(chosen.data, tensor=weights.name)
            if (*opened.shape, opened.ndim) != (*weights.shape, weights.ndim):
                raise ValueError(f"'{weights.name}' is {list(weights.shape)}, the packed tensor is of another shape")
            return
        if weights.role != "experts" and weights.role not in chosen.dense_roles:
            raise ValueError(f"the method {chosen.name} does not pack '{weights.name}' ({weights.role})")
        if chosen.rewrites and chosen is not self.method:
            raise ValueError(f"the method {chosen.name} changes the whole checkpoint, not '{weights.name}' alone")

    def decided(self, weights: Weights) -> Any:
        """What was decided in advance for a tensor, or which packed tensor it is."""
        chosen = self.of(weights)
        return _identity(chosen) if isinstance(chosen, PackedTensor) else chosen.decided(weights.name)

    def bound(self, layer: PackedLayer) -> int:
        """Return the most bytes that a layer can take packed."""
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
        """The settings of the job's method, and what packs the other tensors."""
        if not self.others:
            return dict(self.method.settings)
        return {**self.method.settings, "assigned": {name: _identity(x) for name, x in sorted(self.others.items())}}


def _identity(other: Method | PackedTensor) -> str:
    """What the bytes of a tensor follow from, for the fingerprint of a job."""
    if isinstance(other, PackedTensor):
        return f"{other.kind} {hashlib.sha256(other.data.data).hexdigest()}"
    return f"{other.name} " + ", ".join(f"{key}={value}" for key, value in sorted(other.settings.items()))
