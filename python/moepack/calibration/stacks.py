"""Blocks of a model, run one at a time over the whole calibration set.

A stack is a list of blocks that pass on one hidden state: the decoder of a causal model, or the encoder or decoder of a
sequence-to-sequence model. Other inputs of a block are recorded by running the stack's own forward pass over stand-ins
for its blocks (`arguments`), so no architecture's mask logic is duplicated here. All samples have the same length, so
most arguments depend only on the batch size; those that depend on the tokens are kept per batch.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from moepack.arrays import magnitude
from moepack.calibration.arguments import ENCODER, Arguments, Carried, Shared, StandIn, Stopped, same
from moepack.calibration.buffer import ListBuffer
from moepack.calibration.recorder import Recorder
from moepack.calibration.skeleton import Skeleton
from moepack.calibration.stream import Stream
from moepack.checkpoint import MoeModel
from moepack.decoding.finite import advice
from moepack.errors import CalibrationError, UnsupportedModelError
from moepack.solvers.products import fast_products

__all__ = ["Stack", "decoder_blocks"]

#: The recorder's constant output when the factor of the experts in a block's output is measured. It is large enough
#: that rounding of the residual stream is negligible (2^10 in float32 leaves 13 bits below one).
PROBE = 1024.0


def decoder_blocks(model: MoeModel) -> tuple[str, str]:
    """The path of the module that owns a causal model's list of blocks, and the list's name in it.

    Raises:
        UnsupportedModelError: the first sparse layer is in no list.
    """
    first = model.layers[0].name
    found = re.match(r"(.+?)\.(\w+)\.\d+\.", first)
    if found is None:
        raise UnsupportedModelError(f"the list of blocks that contains '{first}' is unknown")
    return found[1], found[2]


class Stack:
    """One list of blocks.

    Attributes:
        name: path of the module that owns the list, such as `model` or `encoder`.
        list_name: the list's name in it.
        blocks: paths of the blocks.
        shape: shape of a token's hidden state: [H], or more axes if blocks have several residual streams.
        outputs: number of outputs of a block besides the hidden states; None if it returns only these.
        largest: the largest output magnitude of each block, by path.
    """

    def __init__(self, skeleton: Skeleton, name: str, blocks: str, batch: int) -> None:
        """Describe the stack at module `name`, whose list of blocks is its attribute `blocks`."""
        self.skeleton, self.name, self.batch = skeleton, name, batch
        self.module = skeleton.module.get_submodule(name)
        self.list_name = blocks
        count = len(getattr(self.module, blocks))
        self.blocks = [f"{self.list_path}.{i}" for i in range(count)]
        self.shape = torch.Size()
        self.outputs: int | None = None
        self.largest: dict[str, float] = {}
        self._arguments: dict[int, list[Arguments]] = {}

    def embed(self, ids: Tensor, make: Callable[[int], ListBuffer], encoder: ListBuffer | None = None) -> ListBuffer:
        """Return the first block's input for ids [N, L]; records the blocks' other arguments.

        Args:
            ids: the samples.
            make: creates a buffer with a given width.
            encoder: the encoder's final states, for the decoder of a sequence-to-sequence model.

        Raises:
            UnsupportedModelError: blocks depend on more than the preceding block's hidden states and the recorded
                arguments.
        """
        buffer = None
        with self.skeleton.loaded(self.name, without=self.list_name):
            for first, last in self.batches(len(ids)):
                states = None if encoder is None else encoder.samples(first, last).to(self.skeleton.device)
                if first == 0:
                    self.outputs = self._probed(ids[first:last], states)
                stand_ins = self.recorded(ids[first:last], states)
                hidden = stand_ins[0].hidden
                if buffer is None:
                    self.shape = hidden.shape[2:]
                    buffer = make(prod(self.shape))
                    self._refuse_memories(stand_ins, self.recorded(ids[first:last], states, lambda x: 2 * x + 1))
                buffer.samples(first, last).copy_(hidden.flatten(2))
                self._keep(first, [stand_in.arguments for stand_in in stand_ins])
        assert buffer is not None
        return buffer

    def _refuse_memories(self, found: list[StandIn], changed: list[StandIn]) -> None:
        """Reject arguments that depend on the hidden states of earlier blocks."""
        if not same([stand_in.arguments for stand_in in found], [stand_in.arguments for stand_in in changed]):
            raise UnsupportedModelError(
                f"blocks of '{self.name}' depend on more than the preceding block's outputs, which calibration does "
                "not support; finequant and rate pack the model with `--calibration none`"
            )

    def _probed(self, ids: Tensor, encoder: Tensor | None) -> int | None:
        """Return the number of outputs of the first block besides the hidden states; None if it returns only these."""
        (first, *_) = self.recorded(ids, encoder, count=1)
        states = first.hidden
        with self.skeleton.loaded(self.blocks[0]) as block:
            output = self.call(block, states, first.arguments, (), {}, encoder)
        return len(output) - 1 if isinstance(output, tuple) else None

    def recorded(
        self,
        ids: Tensor,
        encoder: Tensor | None = None,
        change: Callable[[Tensor], Tensor] = lambda hidden: hidden,
        count: int | None = None,
    ) -> list[StandIn]:
        """Run the stack's forward pass over stand-ins for its blocks, which record what blocks are given.

        Args:
            ids: [B, L] tokens. encoder: the encoder's states, in a decoder that attends to them.
            change: maps the hidden states through each block.
            count: run up to this block; None runs all.
        """
        extra = {} if encoder is None else {"encoder_hidden_states": encoder}
        with self.stand_ins() as stand_ins:
            stand_ins[(count or len(stand_ins)) - 1].last = True
            for stand_in in stand_ins:
                stand_in.change = change
            with contextlib.suppress(Stopped):
                self.module(input_ids=ids.to(self.skeleton.device), use_cache=False, **extra)
        for stand_in in stand_ins:
            stand_in.arguments = stand_in.arguments.marked(encoder)
        return stand_ins

    @contextlib.contextmanager
    def stand_ins(self) -> Iterator[list[StandIn]]:
        """With stand-ins in the blocks' places."""
        blocks = getattr(self.module, self.list_name)
        stand_ins = [StandIn(block, last=False, outputs=self.outputs) for block in blocks]
        setattr(self.module, self.list_name, nn.ModuleList(stand_ins))
        try:
            yield stand_ins
        finally:
            setattr(self.module, self.list_name, blocks)

    def _keep(self, first: int, arguments: list[Arguments]) -> None:
        """Keep the arguments of a batch, sharing those of an earlier batch if they are equal."""
        known = next((kept for kept in self._arguments.values() if same(kept, arguments)), arguments)
        self._arguments.setdefault(first, known)

    def arguments(self, first: int, index: int) -> Arguments:
        """What block `index` is given beside hidden states, of the batch that begins with sample `first`."""
        return self._arguments[first][index]

    def batches(self, samples: int) -> Iterator[tuple[int, int]]:
        """Yield first and last (exclusive) sample of each batch."""
        for first in range(0, samples, self.batch):
            yield first, min(first + self.batch, samples)

    def run(self, index: int, block: nn.Module, stream: Stream, first: int, last: int, keep: bool = False) -> Tensor:
        """Run a batch of a stream through block `index`, which must be loaded; returns [B, L, W].

        Args:
            index, block: the block.
            stream: the stream.
            first, last: the samples of the batch.
            keep: whether the next block reads this block's other outputs.

        Raises:
            CalibrationError: the output contains NaN or infinity.
        """
        hidden, encoder = stream.batch(first, last, self.skeleton.device)
        states = hidden.view(*hidden.shape[:2], *self.shape)
        arguments = self.arguments(first, index)
        output = self.call(block, states, arguments, stream.carried.get(first, ()), stream.shared_of(first), encoder)
        if isinstance(output, tuple):
            if keep:
                stream.carry(first, output[1:])
            output = output[0]
        largest, place = magnitude(output), self.blocks[index]
        if not math.isfinite(largest):
            message = f"the model computes NaN or infinity in '{place}'"
            raise CalibrationError(f"{message}; {advice(self.skeleton.dtype)}")
        self.largest[place] = max(largest, self.largest.get(place, 0.0))
        return output.flatten(2)  # type: ignore[no-any-return]

    def call(
        self,
        block: nn.Module,
        states: Tensor,
        arguments: Arguments,
        carried: tuple[Any, ...],
        shared: dict[Any, Any],
        encoder: Tensor | None,
    ) -> Any:
        """Return a block's outputs, with the placeholders in its arguments filled in."""

        def fill(value: Any) -> Any:
            if isinstance(value, Carried):
                return carried[value.number]
            if isinstance(value, Shared):
                return shared.setdefault(value.make, value.make())
            return encoder if value is ENCODER else value

        filled = arguments.replaced(fill)
        # Without recorders, the block has experts, whose products have a shape for each number of tokens.
        largest = max((own.numel() for own in block.parameters()), default=0) if self.skeleton.recorders else 0
        with fast_products(math.prod(states.shape[:2]) * largest):
            return block(states, *filled.positional, **filled.named)

    def experts_factor(
        self, index: int, block: nn.Module, recorder: Recorder, stream: Stream, first: int, last: int
    ) -> float | None:
        """Return the factor of the experts' output in the block's output; 1 except for GraniteMoE.

        Running the block without its experts and adding their output later is correct only if the block is linear in
        it, which is measured on one batch. Returns None if it is not, or if the block returns more than hidden states.
        """
        if recorder.kind == "product" or (self.outputs is not None and not self._is_seq2seq):
            return None
        without = self.run(index, block, stream, first, last).float()
        recorder.answer = PROBE
        try:
            share = (self.run(index, block, stream, first, last).float() - without) / PROBE
        finally:
            recorder.answer = 0.0
        factor = float(share.double().mean())
        # float32 resolves 2^-14 of the probe on a residual stream of 2^20; bfloat16 only 2^-8. A norm behind the
        # experts makes the share nearly zero.
        tolerance = abs(factor) * (1e-3 if self.skeleton.dtype == torch.float32 else 2e-2)
        if factor == 0 or not bool(((share - factor).abs() <= tolerance).all()):
            return None
        return 1.0 if abs(factor - 1) <= tolerance else factor

    @property
    def list_path(self) -> str:
        """The path of the list of blocks."""
        return f"{self.name}.{self.list_name}"

    @property
    def _is_seq2seq(self) -> bool:
        """Whether the model is an encoder-decoder.

        Its blocks also return position biases, which do not depend on the experts.
        """
        return bool(self.skeleton.config.is_encoder_decoder)
