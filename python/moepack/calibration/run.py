"""Block-by-block calibration: the whole calibration set through one block, then through the next (QMoE, section 3.2).

For each block the dense part (attention, router, shared experts) runs sample by sample over the list buffer with only
that block's dense weights in memory. Where the block has experts, they follow in groups (see `experts`).

Two streams may run side by side. The *compressed* stream is what the packed model will compute. The *original* stream
passes through the original experts: its routing tells which tokens an expert was trained for, which matters because
routing degrades behind compressed layers until some experts see no token at all. By default the values come from the
compressed stream and the assignment of tokens to experts from the original one.

Invariants: one block's dense weights and one group's experts are in memory at a time; running again with the same
answers gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn

from moepack.calibration.buffer import ListBuffer
from moepack.calibration.experts import ExpertsRun
from moepack.calibration.linears import LinearsRun
from moepack.calibration.samples import Samples
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.skeleton import Recorder, Skeleton
from moepack.calibration.stacks import Stack
from moepack.calibration.stage import LayerRun, enough_memory
from moepack.calibration.stream import Stream
from moepack.checkpoint import Checkpoint, DenseLayer, MoeModel
from moepack.errors import CalibrationError, UnsupportedModelError

__all__ = ["Calibrator"]


class Calibrator:
    """Runs a model block by block, and compresses it on the way:

    for run in calibrator.layers():
        for stage in run:
            with run.smaller_groups():
                run.answer(values of the stage's tensors)

    Attributes:
        hidden: what the last block of a stack gave, once all were run.
    """

    def __init__(
        self, checkpoint: Checkpoint, model: MoeModel, samples: Samples, settings: CalibrationSettings | None = None
    ) -> None:
        """Build the model's skeleton; no weight is read yet.

        Raises:
            CalibrationError: the samples do not fit the architecture.
            UnsupportedModelError: transformers' model is not built as its description says.
        """
        self.settings = settings or CalibrationSettings()
        self.samples, self.model = samples, model
        self.skeleton = Skeleton(checkpoint, model, dtype=self.settings.dtype, device=self.settings.device)
        if bool(self.skeleton.config.is_encoder_decoder) != (samples.targets is not None):
            raise CalibrationError("span-corrupted samples are for encoder-decoder models, and only for them")
        self._by_block = {block: layer for layer in model.layers for block in _enclosing(layer.name)}
        self._factors: dict[str, float] = {}
        self.hidden = ListBuffer([], 1)

    @torch.no_grad()
    def layers(self, dense: Mapping[str, DenseLayer] | None = None) -> Iterator[LayerRun]:
        """Run all blocks in the order of execution.

        Args:
            dense: by block, the linear layers that are compressed too; they come before the experts of their block.

        Yields:
            Each layer while the model passes it. It must be iterated to its end before the next is asked for.

        Raises:
            CalibrationError: the model computes NaN or infinity; names the block.
            DeviceMemoryError: the device is too small for one expert, or for a block's dense part.
        """
        encoders: list[ListBuffer | None] = [None] * self._streams()
        for name, ids, mask in self._stacks():
            stack = Stack(self.skeleton, name, "block" if self._seq2seq else "layers", self.settings.batch)
            streams = [self._stream(stack, ids, encoder, i) for i, encoder in enumerate(encoders)]
            for index, block in enumerate(stack.blocks):
                what = f"'{block}' and {self.settings.batch} samples"
                with enough_memory(self.settings.device, what):
                    for run in self._block(stack, index, streams, mask, (dense or {}).get(block)):
                        yield run
                        if not run.finished:
                            raise RuntimeError(f"'{run.layer.name}' was left before its last stage")
            self.hidden = streams[0].hidden
            if name == "encoder":
                encoders = [self._finish(stack, stream) for stream in streams]

    @property
    def _seq2seq(self) -> bool:
        return self.samples.targets is not None

    def _streams(self) -> int:
        """How many streams run: the original one is only left out where nothing asks for it."""
        wanted = self.settings.drift or self.settings.routing == "original"
        return 2 if self.settings.activations == "compressed" and wanted else 1

    def _stacks(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Name, ids and mask of each list of blocks."""
        if self.samples.targets is None or self.samples.target_mask is None:
            first = self.model.layers[0].name.split(".layers.")
            if len(first) != 2:
                raise UnsupportedModelError(f"do not know the list of blocks that '{self.model.layers[0].name}' is in")
            yield first[0], self.samples.inputs, self.samples.input_mask
        else:
            yield "encoder", self.samples.inputs, self.samples.input_mask
            yield "decoder", self.samples.targets, self.samples.target_mask

    def _stream(self, stack: Stack, ids: Tensor, encoder: ListBuffer | None, number: int) -> Stream:
        """Make stream `number` (0 is the one that Hessians use) and fill it with the embeddings."""
        compressed = self.settings.activations == "compressed" and number == 0
        lengths = [ids.shape[1]] * ids.shape[0]
        width = getattr(self.skeleton.config, "hidden_size", None)
        if not isinstance(width, int):
            raise UnsupportedModelError("methods that run the model know language models only, not one around another")

        def buffer(kind: str) -> ListBuffer:
            directory = self.settings.buffer_directory
            file = None if directory is None else directory / f"{stack.name}.{kind}.{number}"
            return ListBuffer(lengths, width, self.settings.dtype, file, self.settings.buffer_device)

        stream = Stream(compressed, buffer("hidden"), buffer("inputs"), encoder=encoder)
        stack.embed(ids, stream.hidden, encoder)
        return stream

    def _finish(self, stack: Stack, stream: Stream) -> ListBuffer:
        """Apply the encoder's final norm in place: what the decoder attends to."""
        with self.skeleton.loaded(f"{stack.name}.final_layer_norm") as norm:
            for first, last in stack.batches(len(stream.hidden)):
                states = stream.hidden.samples(first, last)
                states.copy_(norm(states.to(self.settings.device)))
        return stream.hidden

    def _block(
        self, stack: Stack, index: int, streams: list[Stream], mask: Tensor, dense: DenseLayer | None
    ) -> Iterator[LayerRun]:
        """Run one block; yields its linear layers, then its experts, where there are some."""
        block, linears = stack.blocks[index], None
        layer = self._by_block.get(block)
        recorder = None if layer is None else self.skeleton.recorders[layer.name]
        with self.skeleton.loaded(block) as module:
            if dense is not None:
                forward = partial(self._forward, stack, index, module, streams, mask)
                order = (0, -1) if len(streams) > 1 else (0,)
                yield (linears := LinearsRun(dense, module, block, self.settings.rounding, forward, order))
            if recorder is not None and stack.name not in self._factors:
                states, encoder = streams[0].batch(*next(stack.batches(len(streams[0].hidden))), self.settings.device)
                self._factors[stack.name] = stack.experts_factor(index, module, recorder, states, encoder)
            for stream in streams:
                with nullcontext() if linears is None else linears.compressed(stream.compressed):
                    self._dense(stack, index, module, stream, recorder)
        if layer is not None and recorder is not None:
            factor = self._factors[stack.name]
            yield ExpertsRun(self.settings, layer, recorder, streams, mask.flatten(), factor)

    @torch.no_grad()
    def _forward(
        self, stack: Stack, index: int, module: nn.Module, streams: list[Stream], mask: Tensor, number: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a block over a stream, and keep nothing; see `linears.Forward`."""
        stream = streams[number]
        read = mask if stream.encoder is None else self.samples.input_mask
        for first, last in stack.batches(len(stream.hidden)):
            stack.run(index, module, *stream.batch(first, last, self.settings.device))
            yield mask[first:last].flatten(), read[first:last].flatten()

    def _dense(self, stack: Stack, index: int, module: nn.Module, stream: Stream, recorder: Recorder | None) -> None:
        """The block without its experts over all samples, in place; keeps what goes to the experts."""
        chosen: list[Tensor] = []
        weights: list[Tensor] = []
        for first, last in stack.batches(len(stream.hidden)):
            output = stack.run(index, module, *stream.batch(first, last, self.settings.device))
            if recorder is not None:
                read = self.settings.rounding(recorder.inputs, "experts") if stream.compressed else recorder.inputs
                stream.inputs.samples(first, last).copy_(read.view(output.shape))
                # int32 halves the memory of the assignment; no model has 2^31 experts.
                where = stream.inputs.tokens.device
                chosen.append(recorder.index.reshape(output.shape[0] * output.shape[1], -1).to(where, torch.int32))
                weights.append(recorder.weights.reshape(chosen[-1].shape).to(where))
            stream.hidden.samples(first, last).copy_(output)
        if recorder is not None:
            stream.index, stream.weights = torch.cat(chosen), torch.cat(weights)
            recorder.inputs = recorder.index = recorder.weights = torch.empty(0)


def _enclosing(name: str) -> list[str]:
    """All module paths above `name`, so that a block is found by a lookup."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
