"""Layers of experts in slots: the outputs of each token in the order of the router's choice, late experts last.

What a slot's number says changes from call to call, so sums over experts have the order of the choice. The host takes
part in every such layer, and nothing that it launches hides how long launching takes (0.6 ms on the host of an H100,
where the kernels run for 0.1): the launches of few tokens are recorded, once for each shape of call, and replayed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moepack.runtime.backends.gpu.families import kernels_of
from moepack.runtime.backends.gpu.matrix import DeviceMatrix, Late
from moepack.runtime.recording import pause, record

__all__ = ["experts"]

RECORDED = 8
"""Most tokens of a call that is recorded: what a recording keeps grows with them."""

_Shape = tuple[int, int, torch.dtype, bool]

_recordings: WeakKeyDictionary[DeviceMatrix, dict[_Shape, "_Recording | None"]] = WeakKeyDictionary()
"""By the last projection, which is the same object in all calls; None after the first call, which loads the kernels."""


def experts(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Sum the outputs of experts in slots, [T, H] float32, of which one caller at a time makes use.

    Args:
        matrices: of the gate, up and down projections, whose experts are slots; the first may have late ones.
        x: [T, C], as kernels take it.
        index: [T, k] int64, slots; a number that is no slot's is skipped.
        weights: [T, k] float32.
    """
    late = matrices[0].late
    shape = *index.shape, x.dtype, late is not None
    known = _recordings.setdefault(matrices[-1], {})
    if len(x) > RECORDED or shape not in known:
        if len(x) <= RECORDED:
            known[shape] = None
        return _outputs(matrices, x, index, weights).sum(1)
    recording = known[shape] = known[shape] or _Recording(matrices, x, index, weights)
    return recording.replayed(x, index, weights, late).sum(1)


def _outputs(matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The outputs of each token's experts times their weights, [T, k, H]."""
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


class _Recording:
    """The launches of calls of one shape.

    Args:
        matrices, x, index, weights: of such a call.
    """

    def __init__(self, matrices: Sequence[DeviceMatrix], x: Tensor, index: Tensor, weights: Tensor) -> None:
        first, *others = matrices
        late = first.late
        self._wait: Callable[[], None] = _nothing
        self._given = [tensor.clone() for tensor in _tensors(x, index, weights, late)]
        given_x, given_index, given_weights, *parts = self._given
        own = replace(first, late=None if late is None else Late(parts[0], parts[1], lambda: self._wait()))
        self._run, self._outputs = record(
            lambda: _outputs([own, *others], given_x, given_index, given_weights), tidy=False
        )

    def replayed(self, x: Tensor, index: Tensor, weights: Tensor, late: Late | None) -> Tensor:
        """Run the launches for a call; the result is written anew by the next one."""
        for given, tensor in zip(self._given, _tensors(x, index, weights, late), strict=True):
            given.copy_(tensor)
        self._wait = _nothing if late is None else late.wait
        self._run()
        return self._outputs


def _tensors(x: Tensor, index: Tensor, weights: Tensor, late: Late | None) -> list[Tensor]:
    return [x, index, weights] if late is None else [x, index, weights, late.there, late.index]


def _nothing() -> None:
    pass
