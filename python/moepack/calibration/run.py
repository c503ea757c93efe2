"""Block-by-block calibration: the whole calibration set passes through one block, then the next (QMoE, section 3.2).

For each block, the dense part (attention, router, shared experts) runs sample by sample over the list buffer, with only
that block's dense weights in memory. The block's experts, if any, follow in groups (see `experts`).

Two streams may run side by side. The *compressed* stream computes what the packed model computes. The *original* stream
passes through the original experts. Its routing shows which tokens an expert was trained for, because routing degrades
behind compressed layers until some experts see no token at all. By default, the values come from the compressed stream
and the assignment of tokens to experts from the original one.

Invariants: one block's dense weights and one group's experts are in memory at a time; running again with the same
answers gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from moepack.calibration.arguments import Stopped
from moepack.calibration.block import BlockRun
from moepack.calibration.buffer import ListBuffer
from moepack.calibration.linears import LinearsRun
from moepack.calibration.samples import Samples
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stacks import Stack, decoder_blocks
from moepack.calibration.stage import LayerRun, enough_memory
from moepack.calibration.stream import Stream
from moepack.checkpoint import Checkpoint, DenseLayer, MoeLayer, MoeModel
from moepack.decoding.vocabulary import require_known, vocabulary_of
from moepack.errors import CalibrationError

__all__ = ["Calibrator"]


class Calibrator:
    """Runs a model block by block and compresses it on the way:

        for run in calibrator.layers():
            for stage in run:
                with run.smaller_groups():
                    run.answer(values of the stage's tensors)

    Attributes:
        stack: the current list of blocks.
        hidden: the output of its last block, after all blocks have run.
        largest: the largest magnitude of activations so far, by block and by layer of experts.
    """

    def __init__(
        self, checkpoint: Checkpoint, model: MoeModel, samples: Samples, settings: CalibrationSettings | None = None
    ) -> None:
        """Build the model's skeleton; reads no weights.

        Raises:
            CalibrationError: the samples do not fit the architecture.
            TokenError: the embedding has no row for a token of the samples.
            UnsupportedModelError: transformers' model does not match its description.
        """
        self.settings = settings or CalibrationSettings()
        self.samples, self.model = samples, model
        self.skeleton = Skeleton(checkpoint, model, dtype=self.settings.dtype, device=self.settings.device)
        if bool(self.skeleton.config.is_encoder_decoder) != (samples.targets is not None):
            raise CalibrationError("span-corrupted samples are required for encoder-decoder models, and only for these")
        for ids in (samples.inputs, samples.targets):
            if ids is not None:
                require_known(ids, vocabulary_of(self.skeleton.module))
        self._by_block: dict[str, list[MoeLayer]] = {}
        for layer in model.layers:
            for block in _enclosing(layer.name):
                self._by_block.setdefault(block, []).append(layer)
        self._factors: dict[str, float | None] = {}
        self._buffers: dict[str, ListBuffer] = {}
        self.hidden = ListBuffer([], 1)
        self.largest: dict[str, float] = {}

    @torch.no_grad()
    def layers(self, dense: Mapping[str, DenseLayer] | None = None) -> Iterator[LayerRun]:
        """Run all blocks in execution order.

        Args:
            dense: by block, the linear layers to compress; they precede the experts of their block.

        Yields:
            Each layer while the model passes it. Iterate it to its end before requesting the next.

        Raises:
            CalibrationError: the model computes NaN or infinity; names the block.
            DeviceMemoryError: the device cannot hold one expert, or a block's dense part.
        """
        encoders: list[ListBuffer | None] = [None] * self._streams()
        for name, blocks, ids, mask in self._stacks():
            self.stack = stack = Stack(self.skeleton, name, blocks, self.settings.batch)
            streams = [self._stream(stack, ids, encoder, i) for i, encoder in enumerate(encoders)]
            for index, block in enumerate(stack.blocks):
                what = f"'{block}' and {self.settings.batch} samples"
                with enough_memory(self.settings.device, what):
                    for run in self._block(stack, index, streams, mask, (dense or {}).get(block)):
                        yield run
                        self.largest[run.layer.name] = run.largest
                        if not run.finished:
                            raise RuntimeError(f"'{run.layer.name}' was not iterated to its last stage")
                self.largest |= stack.largest
            self.hidden = streams[0].hidden
            if name == "encoder":
                encoders = [self._finish(stack, stream) for stream in streams]

    def forget(self) -> None:
        """Drop all hidden states after the last layer, so that their files can be removed."""
        self._buffers.clear()
        self.hidden = ListBuffer([], 1)

    @property
    def _seq2seq(self) -> bool:
        return self.samples.targets is not None

    def _streams(self) -> int:
        """Return the number of streams; the original one runs only if it is needed."""
        wanted = self.settings.drift or self.settings.routing == "original"
        return 2 if self.settings.activations == "compressed" and wanted else 1

    def _stacks(self) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Yield the owner's path, attribute name, ids and mask of each list of blocks."""
        if self.samples.targets is None or self.samples.target_mask is None:
            yield *decoder_blocks(self.model), self.samples.inputs, self.samples.input_mask
        else:
            yield "encoder", "block", self.samples.inputs, self.samples.input_mask
            yield "decoder", "block", self.samples.targets, self.samples.target_mask

    def _stream(self, stack: Stack, ids: Tensor, encoder: ListBuffer | None, number: int) -> Stream:
        """Create stream `number` (0 is the one used for Hessians) and fill it with the embeddings."""
        compressed = self.settings.activations == "compressed" and number == 0
        lengths = [ids.shape[1]] * ids.shape[0]
        hidden = stack.embed(ids, lambda width: self._buffer(f"{stack.name}.hidden.{number}", lengths, width), encoder)
        return Stream(compressed, hidden, encoder=encoder)

    def _buffer(self, name: str, lengths: list[int], width: int) -> ListBuffer:
        """Return a zero buffer, reusing one with the same name, whose content is no longer needed, if it fits."""
        known = self._buffers.get(name)
        if known is not None and known.tokens.shape[1] == width and known.starts.diff().tolist() == lengths:
            known.tokens.zero_()
            return known
        directory = self.settings.buffer_directory
        file = None if directory is None else directory / name
        self._buffers[name] = ListBuffer(lengths, width, self.settings.dtype, file, self.settings.buffer_device)
        return self._buffers[name]

    def _finish(self, stack: Stack, stream: Stream) -> ListBuffer:
        """Apply the encoder's final norm in place; the decoder attends to the result."""
        with self.skeleton.loaded(f"{stack.name}.final_layer_norm") as norm:
            for first, last in stack.batches(len(stream.hidden)):
                states = stream.hidden.samples(first, last)
                states.copy_(norm(states.to(self.settings.device)))
        return stream.hidden

    def _block(
        self, stack: Stack, index: int, streams: list[Stream], mask: Tensor, dense: DenseLayer | None
    ) -> Iterator[LayerRun]:
        """Run one block; yields its linear layers, then its experts, if any."""
        block = stack.blocks[index]
        layers = self._by_block.get(block, [])
        work = BlockRun(self.skeleton, self.settings, stack, index, streams, self._buffer)
        with self.skeleton.loaded(block) as module:
            if dense is not None:
                forward = partial(self._forward, stack, index, module, streams, mask)
                order = (0, -1) if len(streams) > 1 else (0,)
                yield (linears := LinearsRun(dense, module, block, self.settings.rounding, forward, order))
                work.linears = linears
            factor = self._factor(stack, index, module, streams[0], layers)
            if factor is not None:
                work.advance(module, layers[0] if layers else None)
        if factor is None:
            yield from work.repeated(layers, mask.flatten())
        elif layers:
            yield from work.experts(layers[0], mask.flatten(), factor)

    def _factor(
        self, stack: Stack, index: int, module: nn.Module, stream: Stream, layers: list[MoeLayer]
    ) -> float | None:
        """Return the factor of the experts' outputs in the block's output; None if the block must run again."""
        if len(layers) > 1:
            return None
        if layers and stack.name not in self._factors:
            batch = next(stack.batches(len(stream.hidden)))
            recorder = self.skeleton.recorders[layers[0].name]
            self._factors[stack.name] = stack.experts_factor(index, module, recorder, stream, *batch)
        return self._factors[stack.name] if layers else 1.0

    @torch.no_grad()
    def _forward(
        self, stack: Stack, index: int, module: nn.Module, streams: list[Stream], mask: Tensor, number: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Run a block over a stream without keeping results; see `linears.Forward`."""
        stream = streams[number]
        read = mask if stream.encoder is None else self.samples.input_mask
        for first, last in stack.batches(len(stream.hidden)):
            with suppress(Stopped):
                stack.run(index, module, stream, first, last)
            yield mask[first:last].flatten(), read[first:last].flatten()


def _enclosing(name: str) -> list[str]:
    """Return all module paths above `name`, so that a block is found by a lookup."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]
