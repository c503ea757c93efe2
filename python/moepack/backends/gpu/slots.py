"""Expert layers in slots: outputs are summed in the order of the router's choice, with late experts computed last.

A slot holds different experts in different calls, so sums over experts follow the order of the choice. The host takes
part in every such layer, and no GPU work hides the launch overhead (0.6 ms on the host of an H100, for kernels that run
0.1 ms). Launches for few tokens are therefore recorded in CUDA graphs, one for each shape of call, and replayed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moepack.backends.gpu.families import kernels_of
from moepack.backends.gpu.matrix import DeviceMatrix, Late
from moepack.backends.gpu.recording import pause, record

__all__ = ["experts"]

RECORDED = 8
"""The most tokens of a recorded call; the memory that a recording keeps grows with the tokens."""

_Shape = tuple[int, int, torch.dtype, bool]
"""Tokens, experts per token, the dtype of activations, and whether experts are late."""


def experts(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sum the outputs of experts in slots, [T, H] float32; not thread-safe for the same slots.

    Args:
        matrices: gate, up and down projections whose experts are slots; the first may have late experts.
        x: [T, C], in a layout for kernels.
        index: [T, k] int64, slots; out-of-range values are skipped.
        weights: [T, k] float32.
    """
    late = matrices[0].late
    shape = *index.shape, x.dtype, late is not None
    known = _recorded.setdefault(matrices[-1], _Recordings())
    recording = known.of_shape.get(shape)
    if recording is None and shape in known.launched:
        recording = known.record(shape, matrices, x, index, weights)
    if recording is not None:
        return recording.replayed(x, index, weights, late).sum(1)
    outputs = _outputs(matrices, x, index, weights).sum(1)
    if len(x) <= RECORDED and shape not in known.refused:
        known.launched.add(shape)  # its kernels are now loaded, which a recording requires
    return outputs


class _Recordings:
    """The recordings for the slots of one layout.

    Attributes:
        of_shape: the recordings by shape.
        launched: shapes that have run unrecorded.
        refused: shapes that could not be recorded, for example for lack of memory.
    """

    def __init__(self) -> None:
        self.of_shape: dict[_Shape, _Recording] = {}
        self.launched: set[_Shape] = set()
        self.refused: set[_Shape] = set()
        # Shared by all: no two run at once, and the result of one is read before the next one runs.
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(
        self, shape: _Shape, matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor
    ) -> "_Recording | None":
        """Record a shape, if possible."""
        self.launched.discard(shape)
        try:
            self.of_shape[shape] = _Recording(matrices, x, index, weights, self._pool)
        except RuntimeError:
            self.refused.add(shape)
        return self.of_shape.get(shape)


_recorded: WeakKeyDictionary[DeviceMatrix, _Recordings] = WeakKeyDictionary()
"""Recordings by last projection, which is the same object in all calls of a layout."""


def _outputs(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the outputs of each token's experts times their weights, [T, k, H]."""
    gate, up, down = matrices
    gated, (_, rows, inner) = kernels_of(gate.kind).gated, down.shape
    hidden = torch.empty((index.numel(), inner), dtype=torch.float32, device=x.device)
    if gate.late is None:
        gated(gate, up, x, index, hidden)
    else:
        gated(gate, up, x, gate.late.there, hidden)
        pause(gate.late.wait)
        gated(gate, up, x, gate.late.index, hidden)
    each = torch.zeros((*index.shape, rows), dtype=torch.float32, device=x.device)
    kernels_of(down.kind).project(down, hidden, index.view(-1, 1), each.view(-1, rows))
    return each.mul_(weights.unsqueeze(-1))


@dataclass
class _Waiting:
    """Waits for the late experts of the current call."""

    late: Late | None

    def __call__(self) -> None:
        """Wait for them."""
        if self.late is not None:
            self.late.wait()


class _Recording:
    """The recorded launches for calls of one shape.

    Args:
        matrices, x, index, weights: the arguments of such a call.
        pool: the memory pool shared by recordings.
    """

    def __init__(self, matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor, pool: Any) -> None:
        first, *others = matrices
        self._waiting = waiting = _Waiting(None)
        with torch.inference_mode(False), torch.no_grad():  # calls outside of inference mode also write to these
            self._given = [tensor.clone() for tensor in _tensors(x, index, weights, first.late)]
            given_x, given_index, given_weights, *parts = self._given
            own = replace(first, late=Late(parts[0], parts[1], waiting) if parts else None)
            self._run, self._outputs = record(
                lambda: _outputs([own, *others], given_x, given_index, given_weights), x.device, tidy=False, pool=pool
            )

    def replayed(self, x: Tensor, index: Tensor, weights: Tensor, late: Late | None) -> Tensor:
        """Run the launches for a call; the next replay overwrites the result."""
        for given, tensor in zip(self._given, _tensors(x, index, weights, late), strict=True):
            given.copy_(tensor)
        self._waiting.late = late
        self._run()
        return self._outputs


def _tensors(x: Tensor, index: Tensor, weights: Tensor, late: Late | None) -> list[Tensor]:
    return [x, index, weights] if late is None else [x, index, weights, late.there, late.index]
