"""Runs a block over all streams, once or repeatedly, until the outputs of its experts are included.

If a block's output is linear in that of its experts, it runs once without them, and their outputs are added to the
hidden states. Otherwise (a norm, a projection or several residual streams follow the experts, or experts read the
outputs of others), it runs again for each layer of experts, which answers with the outputs of those before. This is
exact for any block, but takes more time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from moepack.calibration.buffer import ListBuffer
from moepack.calibration.experts import ExpertsRun
from moepack.calibration.linears import LinearsRun
from moepack.calibration.recorder import Recorder
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stacks import Stack
from moepack.calibration.stream import Stream
from moepack.checkpoint import MoeLayer

__all__ = ["BlockRun", "MakeBuffer"]

MakeBuffer = Callable[[str, list[int], int], ListBuffer]
"""Creates a zero buffer from a name (reused once its content is no longer needed), lengths of samples, and width."""


class BlockRun:
    """One block of a stack.

    Args:
        skeleton, settings: skeleton and settings of the calibration.
        stack, index: the block.
        streams: the streams that pass through the block.
        make: creates buffers.
    """

    def __init__(
        self,
        skeleton: Skeleton,
        settings: CalibrationSettings,
        stack: Stack,
        index: int,
        streams: Sequence[Stream],
        make: MakeBuffer,
    ) -> None:
        self.skeleton, self.settings, self.stack, self.index = skeleton, settings, stack, index
        self.streams, self.make = list(streams), make
        self.linears: LinearsRun | None = None
        self._outputs: list[dict[str, ListBuffer]] = [{} for _ in streams]

    def advance(self, module: nn.Module, layer: MoeLayer | None = None) -> None:
        """Run the block and replace the hidden states; the inputs of the experts of `layer` are kept."""
        for number, stream in enumerate(self.streams):
            self._pass(module, number, layer, keep=True)
            stream.sums = stream.hidden

    def experts(self, layer: MoeLayer, mask: Tensor, factor: float) -> Iterator[ExpertsRun]:
        """Yield the experts, whose outputs are added to the streams' sums.

        `mask` [B L] marks the positions that count.
        """
        with self.skeleton.loaded(layer.name) as recorder:
            assert isinstance(recorder, Recorder) and self.streams[0].inputs is not None
            rows = len(self.streams[0].inputs.tokens)
            counted = mask if rows == len(mask) else torch.ones(rows, dtype=torch.bool)
            yield ExpertsRun(self.settings, layer, recorder, self.streams, counted, factor)

    def repeated(self, layers: Sequence[MoeLayer], mask: Tensor) -> Iterator[ExpertsRun]:
        """Yield all expert layers in the order in which the block calls them.

        Then run the block and replace the hidden states.
        """
        for layer in layers:
            with self.skeleton.loaded(self.stack.blocks[self.index]) as module:
                for number in range(len(self.streams)):
                    self._pass(module, number, layer, keep=False)
            for number, stream in enumerate(self.streams):
                assert stream.inputs is not None
                lengths, width = stream.inputs.starts.diff().tolist(), layer.projections[-1].shape[1]
                name = f"{self.stack.name}.outputs{len(self._outputs[number])}.{number}"
                stream.sums = self._outputs[number][layer.name] = self.make(name, lengths, width)
            yield from self.experts(layer, mask, 1.0)
        with self.skeleton.loaded(self.stack.blocks[self.index]) as module:
            for number in range(len(self.streams)):
                self._pass(module, number, None, keep=True)

    def _pass(self, module: nn.Module, number: int, layer: MoeLayer | None, keep: bool) -> None:
        """Run the block over a stream, with the experts' outputs known so far.

        Args:
            module: the block, loaded.
            number: the stream.
            layer: the layer whose inputs are kept.
            keep: whether the outputs replace the hidden states.
        """
        stream, recorders = self.streams[number], self.skeleton.recorders
        recorder = None if layer is None else recorders[layer.name]
        seen = _Seen(stream, lambda lengths, width: self.make(f"{self.stack.name}.inputs.{number}", lengths, width))
        compressed = None if self.linears is None else self.linears.compressed(stream.compressed)
        with compressed or nullcontext():
            for first, last in self.stack.batches(len(stream.hidden)):
                for name, outputs in self._outputs[number].items():
                    if not len(outputs.tokens):
                        continue
                    recorders[name].outputs = outputs.samples(first, last).flatten(0, 1).to(self.settings.device)
                output = self.stack.run(self.index, module, stream, first, last, keep)
                if recorder is not None and layer is not None:
                    rows = recorder.inputs
                    if rows is not None and stream.compressed:
                        rows = self.settings.rounding(rows, "experts")
                    seen.add(first, last, rows, recorder, layer)
                if keep:
                    stream.hidden.samples(first, last).copy_(output)
        for known in recorders.values():
            known.forget()
        if recorder is not None:
            seen.finish()


class _Seen:
    """Collects the inputs of a layer's experts, batch by batch."""

    def __init__(self, stream: Stream, make: Callable[[list[int], int], ListBuffer]) -> None:
        self._stream, self._make = stream, make
        self._inputs: ListBuffer | None = None
        self._index: list[Tensor] = []
        self._weights: list[Tensor] = []

    def add(self, first: int, last: int, rows: Tensor | None, recorder: Recorder, layer: MoeLayer) -> None:
        """Keep the rows of samples `first` to `last`; none if the experts were not called."""
        if self._inputs is None:
            count = 0 if rows is None else len(rows) // (last - first)
            self._inputs = self._make([count] * len(self._stream.hidden), layer.projections[0].shape[2])
        if rows is None:
            return
        self._inputs.samples(first, last).copy_(rows.view(last - first, -1, rows.shape[-1]))
        # int32 halves the memory of the assignment; no model has 2^31 experts.
        where = self._inputs.tokens.device
        self._index.append(recorder.index.to(where, torch.int32))
        self._weights.append(recorder.weights.to(where))

    def finish(self) -> None:
        """Pass the collected rows to the stream."""
        self._stream.inputs = self._inputs
        self._stream.index = torch.cat(self._index or [torch.empty(0, 1, dtype=torch.int32)])
        self._stream.weights = torch.cat(self._weights or [torch.empty(0, 1)])
