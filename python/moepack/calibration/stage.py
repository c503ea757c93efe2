"""The unit of work of a compression method, a stage: the tensors of a layer that share an input.

A layer is solved stage by stage. With calibration, the model runs at the same time: a `LayerRun` yields the stages of
one layer in execution order, and each must be answered with the values of the packed tensors before the next is
computed. Without calibration, a stage is one whole tensor (`WholeTensor`) and needs no answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from moepack.arrays import is_finite
from moepack.calibration.moments import Moments
from moepack.checkpoint import DenseLayer, MoeLayer
from moepack.errors import DeviceMemoryError, InvalidTensorError

__all__ = [
    "Fetch",
    "Inputs",
    "LayerRun",
    "PackedLayer",
    "Shape",
    "Stage",
    "Weights",
    "WholeTensor",
    "enough_memory",
    "layer_tensors",
]

PackedLayer = MoeLayer | DenseLayer
"""Tensors packed together: the experts of a layer, or the linear layers of a block."""

Shape = tuple[int, int, int]
"""Shape of a projection: experts, rows (outputs), columns (inputs)."""


class Fetch(Protocol):
    """Returns the weights of an expert, [rows, columns], in the checkpoint's dtype, on a device or mapped."""

    def __call__(self, expert: int, device: torch.device | None = None, /) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class Weights:
    """The weights of one tensor to pack, loaded lazily.

    Attributes:
        name: name of the packed tensor, used in errors.
        shape: experts, rows, columns.
        expert: returns expert i's weights. Fetch one at a time.
        sources: for each expert, the checkpoint tensor that holds it, used in errors about its values.
        role: "experts", or the role of a linear layer outside the experts: "attention", "shared", "mlp" or "head". Such
            a layer is one matrix: its shape is [1, rows, columns], and the packed tensor is two-dimensional.
        nbytes: size in bytes in the checkpoint.
        dtype: dtype of the weights in the checkpoint, if known.
    """

    name: str
    shape: Shape
    expert: Fetch
    sources: tuple[str, ...]
    role: str = "experts"
    nbytes: int = 0
    dtype: torch.dtype | None = None

    @property
    def ndim(self) -> int:
        """Number of dimensions of the packed tensor: 3 for experts, 2 for a linear layer."""
        return 3 if self.role == "experts" else 2

    def one_expert(self) -> Weights:
        """Return the first expert alone, to test a method on such weights."""
        return replace(self, shape=(1, *self.shape[1:]), sources=self.sources[:1])


def layer_tensors(layer: PackedLayer) -> dict[str, Weights]:
    """Return the tensors of a layer in computation order, by projection name or linear layer path."""
    if isinstance(layer, MoeLayer):
        return {
            p.name: Weights(
                p.packed_name, p.shape, p.expert, tuple(part.tensor for part in p.parts), nbytes=p.nbytes, dtype=p.dtype
            )
            for p in layer.projections
        }
    return {
        linear.name: Weights(
            linear.source, (1, *linear.shape), lambda _, device=None, linear=linear: linear.matrix(device),
            (linear.source,), linear.role, linear.nbytes, linear.checkpoint.info(linear.source).dtype,
        )
        for linear in layer.linears
    }  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Inputs of a stage's tensors, as the compressed model computes them.

    Attributes:
        tokens: [G] int64, number of tokens in each Hessian; empty for linear layers, which every token visits.
        pieces: yields the tokens of the group's i-th expert, [n, C], in pieces.
        hessians: computes [G, C, C] float32 on the device, the sum of x^T x over those tokens.
        moments: computes the second moments of the same inputs, each token weighted by its influence on the layer's
            output (equally for linear layers). With the argument True, also those with the *drift*, the difference
            from the original model's inputs (zero if the original model does not run).
        weights: the router's weights of the same tokens, [n], in the same pieces; empty for linear layers.
        rows: indices of the same tokens in the inputs that `LayerRun.rows` returns, [n] int64, in the same pieces;
            empty for linear layers.
    """

    tokens: Tensor
    pieces: Callable[[int], Iterator[Tensor]]
    hessians: Callable[[], Tensor]
    moments: Callable[[bool], Moments]
    weights: Callable[[int], Iterator[Tensor]] = lambda _: iter(())
    rows: Callable[[int], Iterator[Tensor]] = lambda _: iter(())


@dataclass(frozen=True)
class Stage:
    """Tensors of a layer with a common input, the unit of work of a compression method.

    The method *solves* a stage: it chooses the quantized values of all tensors, together or one by one.

    Attributes:
        layer: name of the layer.
        tensors: projections of the experts by name, or linear layers by path.
        experts: the experts in this stage, ascending; all of them without calibration.
        weights: with calibration, [G, R, C] float32 on the device by name. Empty without calibration: a method then
            fetches one expert at a time from `tensors`.
        inputs: inputs of the tensors; None without calibration.
        plan: result of the method's `layer_plan` after it has seen all stages of the layer.
        spent: packed sizes in bytes of the tensors of earlier layers of the job, keyed by name, in processing order.
            Tensors in `others` of `compress` are not included; layers that an interrupted run finished are.
        advance: callback for the number of weights just solved, to be called at least once per expert or stage.
    """

    layer: str
    tensors: Mapping[str, Weights]
    experts: range
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Inputs | None = None
    plan: Any = None
    spent: Mapping[str, int] = field(default_factory=dict)
    advance: Callable[[int], None] = lambda _: None

    @property
    def dense(self) -> bool:
        """Whether the stage holds linear layers outside the experts."""
        return all(weights.ndim == 2 for weights in self.tensors.values())

    def only(self, names: Collection[str]) -> Stage:
        """Return this stage restricted to the tensors in `names`."""
        weights = {name: weights for name, weights in self.weights.items() if name in names}
        return replace(self, tensors={name: self.tensors[name] for name in names}, weights=weights)

    def with_cached_moments(self) -> Stage:
        """Return this stage with moments that are computed once, for tensors that are solved one after another."""
        assert self.inputs is not None
        return replace(self, inputs=replace(self.inputs, moments=cache(self.inputs.moments)))

    def finite(self) -> Stage:
        """Return this stage after checking that its weights are finite.

        Raises:
            InvalidTensorError: a weight is NaN or infinite; the message names the checkpoint's tensor.
        """
        for name, given in self.weights.items():
            if not is_finite(given):
                expert = self.experts[[is_finite(matrix) for matrix in given].index(False)]
                who = "" if self.dense else f"expert {expert} "
                message = f"{who}holds NaN or infinite weights"
                raise InvalidTensorError(message, tensor=self.tensors[name].sources[expert])
        return self

    def hessians(self) -> Tensor:
        """See `Inputs`; only with calibration."""
        assert self.inputs is not None
        return self.inputs.hessians()

    def moments(self, drift: bool = True) -> Moments:
        """See `Inputs`; only with calibration. Without `drift`, the original model need not run."""
        assert self.inputs is not None
        return self.inputs.moments(drift)


class LayerRun(ABC):
    """The forward pass of one layer during calibration, divided into stages.

    Each stage must be answered before the next one is requested. Iterate once, and to the end:

        for stage in run:
            with run.smaller_groups():
                run.answer(values of the stage's tensors)

    Attributes:
        layer: the layer.
        tensors: its tensors, as returned by `layer_tensors`.
        tokens: [E] int64, number of tokens in each expert's Hessians; None for linear layers.
        finished: whether all stages were answered and the next layer can read the layer's outputs.
        largest: the largest magnitude of activations inside the experts so far.
        waves: the groups of experts, in order. Groups of one wave are solved independently of each other; none for
            linear layers.
    """

    waves: Sequence[Sequence[range]] = ()

    def __init__(self, layer: PackedLayer) -> None:
        self.layer, self.tensors = layer, layer_tensors(layer)
        self.tokens: Tensor | None = None
        self.finished = False
        self.largest = 0.0
        self._answer: Mapping[str, Tensor] | torch.OutOfMemoryError | None = None

    @torch.no_grad()
    def __iter__(self) -> Iterator[Stage]:
        yield from self._stages()
        self.finished = True

    @abstractmethod
    def _stages(self) -> Iterator[Stage]:
        """Yield the stages; `_take` returns the answer to the one just yielded."""

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """Return the experts' inputs, [T, C], and the choices of each token, [T, k], with -1 for none.

        Linear layers return None. Both buffers are reused for the next layer.
        """
        return None

    def previews(self) -> Iterator[Stage]:
        """Yield all stages of the experts before any of them is solved, so that a method can plan.

        The inputs of each stage are computed with the original weights of the preceding stages.
        """
        return iter(())

    def answer(self, values: Mapping[str, Tensor]) -> None:
        """Set the new values of the stage's tensors, [G, R, C] by name, on any device."""
        self._answer = values

    @contextmanager
    def smaller_groups(self) -> Iterator[None]:
        """Handle running out of device memory: the stage's experts are yielded again in groups of half the size."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            self._answer = error

    def keep(self) -> None:
        """Answer every stage with the original weights; raises InvalidTensorError if they are not finite."""
        for stage in self:
            self.answer(stage.finite().weights)

    def _take(self) -> Mapping[str, Tensor]:
        """Return the answer to the last stage, or raise its OutOfMemoryError."""
        answer, self._answer = self._answer, None
        if isinstance(answer, torch.OutOfMemoryError):
            raise answer
        if answer is None:
            raise RuntimeError(f"a stage of '{self.layer.name}' was not answered")
        return answer


class WholeTensor(LayerRun):
    """One tensor of a layer as one stage without inputs."""

    def __init__(self, layer: PackedLayer, name: str) -> None:
        super().__init__(layer)
        self.name = name

    def _stages(self) -> Iterator[Stage]:
        tensor = self.tensors[self.name]
        yield Stage(self.layer.name, {self.name: tensor}, range(tensor.shape[0]))


@contextmanager
def enough_memory(device: torch.device, what: str) -> Iterator[None]:
    """Convert torch's out-of-memory error into a `DeviceMemoryError` that says what did not fit."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(f"{device} has too little memory for {what}") from error
