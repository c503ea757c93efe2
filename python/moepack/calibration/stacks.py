"""Blocks of a model, run one at a time over the whole calibration set.

A stack is a list of blocks that pass one hidden state on: the decoder of a causal model, or the encoder or the decoder
of a sequence-to-sequence model. What a block needs beside the hidden state (masks, positions, rotary tables) is
recorded once by running the stack's own forward over stand-ins for its blocks, so no architecture's mask logic is
written again here. All samples have one length, so these arguments depend on the batch size only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration.buffer import ListBuffer
from moepack.calibration.skeleton import Recorder, Skeleton
from moepack.errors import CalibrationError, UnsupportedModelError

__all__ = ["Stack"]

#: The stand-in's answer when the share of the experts in a block's output is measured: so large that rounding of the
#: residual stream does not show (2^10 in float32 leaves 13 bits below one).
PROBE = 1024.0


class _Done(Exception):
    """Ends the stack's forward behind its last block."""


class _StandIn(nn.Module):
    """Takes a block's place: keeps its arguments and passes the hidden state on."""

    def __init__(self, block: nn.Module, last: bool) -> None:
        super().__init__()
        # Not registered as a child: only attributes such as `attention_type` are read from it.
        self.__dict__["block"] = block
        self.last = last
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.hidden = torch.empty(0)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        self.hidden, self.arguments = hidden, (args, kwargs)
        if self.last:
            raise _Done
        return hidden, None, None


class _CausalStandIn(_StandIn):
    """The same for blocks that return the hidden state alone."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden, *args, **kwargs)[0]


class Stack:
    """One list of blocks.

    Attributes:
        name: path of the module that owns the list, such as `model` or `encoder`.
        blocks: paths of the blocks.
    """

    #: Positions in the arguments of a Switch block, without the hidden state.
    POSITION_BIAS, ENCODER_STATES, CROSS_BIAS = 1, 2, 4

    def __init__(self, skeleton: Skeleton, name: str, blocks: str, batch: int) -> None:
        """Describe the stack at module `name`, whose list of blocks is its attribute `blocks`."""
        self.skeleton, self.name, self.batch = skeleton, name, batch
        self.module = skeleton.module.get_submodule(name)
        self.list_name = blocks
        count = len(getattr(self.module, blocks))
        self.blocks = [f"{name}.{blocks}.{i}" for i in range(count)]
        self.seq2seq = bool(skeleton.config.is_encoder_decoder)
        self._arguments: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        self._biases: dict[int, tuple[Any, Any]] = {}

    def embed(self, ids: Tensor, buffer: ListBuffer, encoder: ListBuffer | None = None) -> None:
        """Fill `buffer` with what enters the first block for ids [N, L], and record the blocks' other arguments.

        Args:
            encoder: the encoder's final states, for the decoder of a sequence-to-sequence model.
        """
        device = self.skeleton.device
        blocks = getattr(self.module, self.list_name)
        kind = _StandIn if self.seq2seq else _CausalStandIn
        stand_ins = [kind(block, i == len(blocks) - 1) for i, block in enumerate(blocks)]
        setattr(self.module, self.list_name, nn.ModuleList(stand_ins))
        try:
            with self.skeleton.loaded(f"{self.name}.embed_tokens"):
                for first, last in self.batches(len(buffer)):
                    extra: dict[str, Any] = {}
                    if encoder is not None:
                        extra["encoder_hidden_states"] = encoder.samples(first, last).to(device)
                    with contextlib.suppress(_Done):
                        self.module(input_ids=ids[first:last].to(device), use_cache=False, **extra)
                    buffer.samples(first, last).copy_(stand_ins[0].hidden)
                    self._arguments.setdefault(last - first, [self._kept(s.arguments) for s in stand_ins])
        finally:
            setattr(self.module, self.list_name, blocks)

    def _kept(self, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments to keep: without the encoder's states, which differ from batch to batch."""
        args, kwargs = arguments
        if not self.seq2seq:
            return args, kwargs
        return (*args[: self.ENCODER_STATES], None, *args[self.ENCODER_STATES + 1 :]), kwargs

    def batches(self, samples: int) -> Iterator[tuple[int, int]]:
        """First and last (exclusive) sample of each batch."""
        for first in range(0, samples, self.batch):
            yield first, min(first + self.batch, samples)

    def run(self, index: int, block: nn.Module, states: Tensor, encoder: Tensor | None = None) -> Tensor:
        """One batch of states [B, L, H] through block `index`, which must be loaded.

        Raises:
            CalibrationError: the output holds NaN or infinity.
        """
        args, kwargs = self._arguments[len(states)][index]
        if self.seq2seq:
            changed = list(args)
            if index > 0:
                changed[self.POSITION_BIAS], changed[self.CROSS_BIAS] = self._biases[len(states)]
            changed[self.ENCODER_STATES] = encoder
            args = tuple(changed)
        output = block(states, *args, **kwargs)
        if isinstance(output, tuple):
            if self.seq2seq and index == 0:
                self._biases.setdefault(len(states), (output[1], output[2]))
            output = output[0]
        if not bool(torch.isfinite(output).all()):
            raise CalibrationError(f"the model computes NaN or infinity in '{self.blocks[index]}'")
        return output  # type: ignore[no-any-return]

    def experts_factor(
        self, index: int, block: nn.Module, recorder: Recorder, states: Tensor, encoder: Tensor | None
    ) -> float:
        """The factor with which the output of the experts enters the block's output; 1 but for GraniteMoE.

        Running the block without its experts and adding their output later is only right if the block is linear in
        it; that is measured on one batch of states [B, L, H].

        Raises:
            UnsupportedModelError: the block is not linear in the output of its experts.
        """
        without = self.run(index, block, states, encoder).float()
        recorder.answer = PROBE
        try:
            share = (self.run(index, block, states, encoder).float() - without) / PROBE
        finally:
            recorder.answer = 0.0
        factor = float(share.double().mean())
        # float32 keeps 2^-14 of the probe beside a residual stream of 2^20; bfloat16 only 2^-8.
        tolerance = 1e-3 if self.skeleton.dtype == torch.float32 else 2e-2
        if not bool(((share - factor).abs() <= tolerance).all()):
            raise UnsupportedModelError(f"the output of '{self.blocks[index]}' is not linear in that of its experts")
        return 1.0 if abs(factor - 1) <= tolerance else factor
