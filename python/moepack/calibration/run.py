"""Block-by-block calibration: the whole calibration set through one block, then through the next (QMoE, section 3.2).

For each block the dense part (attention, router, shared experts) runs sample by sample over the list buffer with only
that block's dense weights in memory. Where the block has experts, they are then fetched in groups: the tokens of a
group are gathered, a caller's `solve` turns the group's weights into compressed ones, and the outputs of the compressed
experts are added to the buffer in place. So what enters the next block has passed through compressed experts.

Two streams may run side by side. The *compressed* stream is what the packed model will compute. The *original* stream
passes through the original experts: its routing tells which tokens an expert was trained for, which matters because
routing degrades behind compressed layers until some experts see no token at all. By default the values come from the
compressed stream and the assignment of tokens to experts from the original one; coverage is counted for both.

Invariants: one block's dense weights and one group's experts are in memory at a time; results do not depend on the
group size but for the order of floating-point sums; running again with the same answers of `solve` gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch
from torch import Tensor

from moepack.calibration.buffer import ListBuffer
from moepack.calibration.linears import Linears, SolveLinears
from moepack.calibration.moments import Moments, Tokens, expert_moments, sensitivity
from moepack.calibration.samples import Samples
from moepack.calibration.skeleton import Recorder, Skeleton
from moepack.calibration.stacks import Stack
from moepack.checkpoint import Checkpoint, DenseLayer
from moepack.checkpoint.model import MoeLayer, MoeModel
from moepack.errors import CalibrationError, DeviceMemoryError, UnsupportedModelError
from moepack.solvers.activations import Rounding

__all__ = ["CalibrationSettings", "Calibrator", "Coverage", "Plan", "Solve", "Stage"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class CalibrationSettings:
    """How calibration runs.

    Attributes:
        activations: "compressed" feeds each block what the compressed blocks before it give; "original" feeds it what
            the original model gives.
        routing: whose router assigns tokens to experts for the Hessians: "original" or "compressed". Only looked at
            with compressed activations.
        drift: run the original model beside the compressed one even where its routing is not used, so that moments
            know the drift. Only looked at with compressed activations.
        rounding: what the compressed stream makes of what compressed layers read.
        group: experts solved together.
        token_cap: most tokens of an expert held at a time, as a multiple of the mean over experts; the rest follows
            in further pieces.
        batch: samples a forward pass.
        dtype: of weights, hidden states and matrix products; Hessians are always float32.
        device: where blocks and experts run.
        buffer_directory: where to map the list buffers, or `None` for memory.
        buffer_device: whose memory holds the list buffers where they are not mapped: the CPU's, or that of `device` for
            calibration sets that fit there (N * L * H states for each stream, twice).
    """

    activations: Literal["compressed", "original"] = "compressed"
    routing: Literal["original", "compressed"] = "original"
    drift: bool = False
    rounding: Rounding = field(default_factory=Rounding)
    group: int = 16
    token_cap: float = 4.0
    batch: int = 8
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    buffer_directory: Path | None = None
    buffer_device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if self.group < 1 or self.batch < 1 or not self.token_cap > 0:
            raise ValueError("group, batch and token_cap must be positive")


@dataclass(frozen=True)
class Coverage:
    """Tokens that count for each expert of a layer, [E] int64, by the routing of either model.

    `compressed` equals `original` where only the original stream runs.
    """

    layer: str
    original: Tensor
    compressed: Tensor

    def used(self, routing: str) -> Tensor:
        """Return the counts of the routing that the Hessians followed."""
        return self.original if routing == "original" else self.compressed


@dataclass(frozen=True)
class Stage:
    """A group of experts of one layer, up to their activation or behind it.

    Attributes:
        layer: the layer.
        experts: indices of the group's experts, ascending.
        weights: by projection, [G, R, C] float32 on the device: all projections that read the same inputs.
        tokens: [G] int64, tokens that each Hessian is made of.
        hessians: computes [G, C, C] float32 on the device, the sum of x^T x over those tokens.
        inputs: the tokens of the group's i-th expert, [n, C], in pieces.
        moments: computes the moments of the same tokens, weighted by their effect, with the drift from the original
            stream (zero where only one stream runs).
    """

    layer: MoeLayer
    experts: range
    weights: dict[str, Tensor]
    tokens: Tensor
    hessians: Callable[[], Tensor]
    inputs: Callable[[int], Iterator[Tensor]]
    moments: Callable[[], Moments]


Solve = Callable[[Stage], dict[str, Tensor]]
"""Turns a stage into compressed weights, [G, R, C] by projection. Called for the first projections of a group, then for
its last one; must not keep state that a second call for the same experts (in smaller groups) would break."""

Plan = Callable[[Stage], None]
"""Sees every stage of a layer before the first is solved, its last projection's inputs computed by the original weights
of the first ones. The same holds for a second call."""


@dataclass(frozen=True)
class DenseWork:
    """Linear layers outside the experts that are compressed too.

    Attributes:
        layers: by block.
        solve: solves their stages.
    """

    layers: Mapping[str, DenseLayer]
    solve: SolveLinears


@dataclass
class _Assignment:
    """Which tokens go to which expert: positions [n] sorted by expert, with their router weights."""

    tokens: Tensor
    weights: Tensor
    starts: list[int]

    @classmethod
    def of(cls, index: Tensor, weights: Tensor, experts: int, keep: Tensor | None = None) -> _Assignment:
        """Sort the choices index [T, k] by expert; `keep` [T] bool leaves tokens out."""
        choices = index.flatten().long()
        wanted = choices >= 0
        if keep is not None:
            wanted &= keep.to(index.device).repeat_interleave(index.shape[1])
        where = wanted.nonzero().flatten()
        order = torch.argsort(choices[where], stable=True)
        where = where[order]
        counts = torch.bincount(choices[where], minlength=experts)
        starts = [0, *counts.cumsum(0).tolist()]
        return cls(where // index.shape[1], weights.flatten()[where], starts)

    def pieces(self, expert: int, cap: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and weights of an expert, at most `cap` at a time."""
        for first in range(self.starts[expert], self.starts[expert + 1], cap):
            last = min(first + cap, self.starts[expert + 1])
            yield self.tokens[first:last], self.weights[first:last]

    def counts(self) -> Tensor:
        return torch.tensor(self.starts).diff()


@dataclass
class _Stream:
    """One model's states: the hidden states, what the experts of the current layer get, and who gets it."""

    compressed: bool
    hidden: ListBuffer
    inputs: ListBuffer
    index: Tensor | None = None
    weights: Tensor | None = None
    encoder: ListBuffer | None = None


class Calibrator:
    """Runs a model block by block. Iterate over `layers`, which compresses as it goes."""

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

    def layers(
        self, solve: Solve, plan: Plan | None = None, dense: DenseWork | None = None
    ) -> Iterator[tuple[MoeLayer | DenseLayer, Coverage]]:
        """Run all blocks in the order of execution; yields each sparse layer once it is solved.

        With `plan`, all stages of a layer are shown to it before the first is solved. With `dense`, the linear layers
        of a block are solved, and yielded (with no coverage), before its experts.

        Raises:
            CalibrationError: the model computes NaN or infinity; names the block.
            DeviceMemoryError: the device is too small for one expert, or for a block's dense part.
        """
        encoders: list[ListBuffer | None] = [None] * self._streams()
        for name, ids, mask in self._stacks():
            stack = Stack(self.skeleton, name, "block" if self._seq2seq else "layers", self.settings.batch)
            streams = [self._stream(stack, ids, encoder, i) for i, encoder in enumerate(encoders)]
            for index, block in enumerate(stack.blocks):
                try:
                    yield from self._block(stack, index, block, streams, mask, solve, plan, dense)
                except torch.OutOfMemoryError as error:
                    raise DeviceMemoryError(
                        f"{self.settings.device} has too little memory for '{block}' and {self.settings.batch} samples"
                    ) from error
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
        if self.samples.targets is None or self.samples.target_mask is None:
            first = self.model.layers[0].name.split(".layers.")
            if len(first) != 2:
                raise UnsupportedModelError(f"do not know the list of blocks that '{self.model.layers[0].name}' is in")
            yield first[0], self.samples.inputs, self.samples.input_mask
        else:
            yield "encoder", self.samples.inputs, self.samples.input_mask
            yield "decoder", self.samples.targets, self.samples.target_mask

    @torch.no_grad()
    def _stream(self, stack: Stack, ids: Tensor, encoder: ListBuffer | None, number: int) -> _Stream:
        """Make stream `number` (0 is the one that Hessians use) and fill it with the embeddings."""
        compressed = self.settings.activations == "compressed" and number == 0
        lengths = [ids.shape[1]] * ids.shape[0]
        width = int(self.skeleton.config.hidden_size)

        def buffer(kind: str) -> ListBuffer:
            directory = self.settings.buffer_directory
            file = None if directory is None else directory / f"{stack.name}.{kind}.{number}"
            return ListBuffer(lengths, width, self.settings.dtype, file, self.settings.buffer_device)

        stream = _Stream(compressed, buffer("hidden"), buffer("inputs"), encoder=encoder)
        stack.embed(ids, stream.hidden, encoder)
        return stream

    @torch.no_grad()
    def _finish(self, stack: Stack, stream: _Stream) -> ListBuffer:
        """Apply the encoder's final norm in place: what the decoder attends to."""
        with self.skeleton.loaded(f"{stack.name}.final_layer_norm") as norm:
            for first, last in stack.batches(len(stream.hidden)):
                states = stream.hidden.samples(first, last)
                states.copy_(norm(states.to(self.settings.device)))
        return stream.hidden

    @torch.no_grad()
    def _block(
        self,
        stack: Stack,
        index: int,
        block: str,
        streams: list[_Stream],
        mask: Tensor,
        solve: Solve,
        plan: Plan | None,
        dense: DenseWork | None,
    ) -> Iterator[tuple[MoeLayer | DenseLayer, Coverage]]:
        layer = self._by_block.get(block)
        recorder = None if layer is None else self.skeleton.recorders[layer.name]
        with self.skeleton.loaded(block) as module:
            linears = None
            if dense is not None and block in dense.layers:
                linears = Linears(dense.layers[block], module, block, self.settings.rounding)
                self._solve_linears(linears, dense.solve, stack, index, module, streams, mask)
                yield linears.layer, Coverage(block, torch.empty(0), torch.empty(0))
            if recorder is not None and stack.name not in self._factors:
                states, encoder = self._batch(streams[0], *next(stack.batches(len(streams[0].hidden))))
                self._factors[stack.name] = stack.experts_factor(index, module, recorder, states, encoder)
            for stream in streams:
                with nullcontext() if linears is None else linears.compressed(stream.compressed):
                    self._dense(stack, index, module, stream, recorder)
        if layer is None or recorder is None:
            return
        sparse = _SparseLayer(self.settings, layer, recorder, streams, mask.flatten(), self._factors[stack.name])
        if plan is not None:
            sparse.plan(plan)
        sparse.run(solve)
        yield layer, sparse.coverage()

    @torch.no_grad()
    def _solve_linears(
        self,
        linears: Linears,
        solve: SolveLinears,
        stack: Stack,
        index: int,
        module: torch.nn.Module,
        streams: list[_Stream],
        mask: Tensor,
    ) -> None:
        """Compress the linear layers of a block that is loaded."""

        def runs(number: int) -> Iterator[tuple[Tensor, Tensor]]:
            stream = streams[number]
            read = mask if stream.encoder is None else self.samples.input_mask
            for first, last in stack.batches(len(stream.hidden)):
                stack.run(index, module, *self._batch(stream, first, last))
                yield mask[first:last].flatten(), read[first:last].flatten()

        linears.solve(runs, (0, -1) if len(streams) > 1 else (0,), solve)

    def _batch(self, stream: _Stream, first: int, last: int) -> tuple[Tensor, Tensor | None]:
        """States of samples and, in a decoder, the encoder's states of the same samples; on the device."""
        device = self.settings.device
        encoder = None if stream.encoder is None else stream.encoder.samples(first, last).to(device)
        return stream.hidden.samples(first, last).to(device), encoder

    def _dense(
        self, stack: Stack, index: int, module: torch.nn.Module, stream: _Stream, recorder: Recorder | None
    ) -> None:
        """The block without its experts over all samples, in place; keeps what goes to the experts."""
        chosen: list[Tensor] = []
        weights: list[Tensor] = []
        for first, last in stack.batches(len(stream.hidden)):
            states, encoder = self._batch(stream, first, last)
            output = stack.run(index, module, states, encoder)
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


class _SparseLayer:
    """The experts of one block, group by group."""

    def __init__(
        self,
        settings: CalibrationSettings,
        layer: MoeLayer,
        recorder: Recorder,
        streams: list[_Stream],
        mask: Tensor,
        factor: float,
    ) -> None:
        self.settings, self.layer, self.recorder, self.streams, self.factor = settings, layer, recorder, streams, factor
        self.routes = [self._assignment(stream) for stream in streams]
        counted = [self._assignment(stream, mask) for stream in streams]
        # Stream 0 holds the values; the last stream is the original one where there are two.
        self.counted = counted
        self.hessian_tokens = counted[-1 if settings.routing == "original" else 0]
        self.cap = max(1, int(settings.token_cap * len(self.routes[0].tokens) / max(layer.experts, 1)))
        *self.first, self.last = [projection.name for projection in layer.projections]
        self.fetch = {projection.name: projection for projection in layer.projections}

    def _assignment(self, stream: _Stream, mask: Tensor | None = None) -> _Assignment:
        assert stream.index is not None and stream.weights is not None
        return _Assignment.of(stream.index, stream.weights, self.layer.experts, mask)

    def coverage(self) -> Coverage:
        """Count the tokens of each expert by either routing."""
        return Coverage(self.layer.name, self.counted[-1].counts(), self.counted[0].counts())

    def run(self, solve: Solve) -> None:
        """Solve all groups and run the tokens through them."""
        for group, outputs in self._groups(lambda group: self._solve(group, solve)):
            self._forward(group, *outputs)

    def plan(self, plan: Plan) -> None:
        """Show all stages to `plan`."""
        for _ in self._groups(lambda group: self._show(group, plan)):
            pass

    def _groups(self, work: Callable[[range], _T]) -> Iterator[tuple[range, _T]]:
        """Results of `work` for all groups of experts; a group for which the device is too small is halved."""
        pending = [
            range(i, min(i + self.settings.group, self.layer.experts))
            for i in range(0, self.layer.experts, self.settings.group)
        ]
        while pending:
            group = pending.pop(0)
            try:
                outputs = work(group)
            except torch.OutOfMemoryError as error:
                if len(group) == 1:
                    raise DeviceMemoryError(
                        f"{self.settings.device} has too little memory for one expert of '{self.layer.name}'"
                    ) from error
                half = len(group) // 2
                pending[:0] = [group[:half], group[half:]]
                continue
            yield group, outputs

    def _weights(self, names: list[str], group: range) -> dict[str, Tensor]:
        """The group's weights by projection, [G, R, C] float32 on the device."""
        return {
            name: torch.stack([self.fetch[name].expert(e).float() for e in group]).to(self.settings.device)
            for name in names
        }

    def _solve(self, group: range, solve: Solve) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Original and compressed weights of a group, each as a dictionary by projection."""
        original = self._weights([*self.first, self.last], group)
        solved = solve(self._stage(group, self.first, original, None))
        values = {name: solved[name].to(self.settings.dtype) for name in self.first}
        feeding = values if self.streams[0].compressed else original
        last = solve(self._stage(group, [self.last], original, feeding))
        values[self.last] = last[self.last].to(self.settings.dtype)
        return original, values

    def _show(self, group: range, plan: Plan) -> None:
        original = self._weights([*self.first, self.last], group)
        plan(self._stage(group, self.first, original, None))
        plan(self._stage(group, [self.last], original, original))

    def _stage(
        self, group: range, names: list[str], original: dict[str, Tensor], feeding: dict[str, Tensor] | None
    ) -> Stage:
        """A stage; `feeding` holds the weights whose outputs are its inputs, `None` for the first projections."""
        weights = {name: original[name] for name in names}
        columns = weights[names[0]].shape[-1]

        def inputs(position: int) -> Iterator[Tensor]:
            for tokens, _ in self.hessian_tokens.pieces(group[position], self.cap):
                x = self.streams[0].inputs.gather(tokens, self.settings.device)
                yield x if feeding is None else self._activations(x, feeding, position, self.streams[0].compressed)

        def hessians() -> Tensor:
            result = torch.zeros(len(group), columns, columns, device=self.settings.device)
            for position in range(len(group)):
                for piece in inputs(position):
                    x = piece.float()
                    result[position].addmm_(x.T, x)
            return result

        def moments() -> Moments:
            pieces = [self._tokens(group, position, original, feeding) for position in range(len(group))]
            return expert_moments(pieces, columns, self.settings.device)

        tokens = self.hessian_tokens.counts()[group.start : group.stop]
        return Stage(self.layer, group, weights, tokens, hessians, inputs, moments)

    def _tokens(
        self, group: range, position: int, original: dict[str, Tensor], feeding: dict[str, Tensor] | None
    ) -> Iterator[Tokens]:
        """The tokens of one expert with their originals and weights, in pieces."""
        for tokens, share in self.hessian_tokens.pieces(group[position], self.cap):
            x, before = (self.streams[i].inputs.gather(tokens, self.settings.device) for i in (0, -1))
            counts = share.to(x.device).float().square()
            if feeding is None:
                parts = self._outputs(x, original, position)
                counts = counts * sensitivity(parts, self.recorder.activate, original[self.last][position])
                yield Tokens(x, before, counts)
            else:
                after = self._activations(before, original, position)
                before_last = self._activations(x, feeding, position, self.streams[0].compressed)
                yield Tokens(before_last, after, counts)

    def _activations(self, x: Tensor, weights: dict[str, Tensor], position: int, compressed: bool = False) -> Tensor:
        """Inputs of the last projection for tokens x [n, C]; in the compressed model they are rounded."""
        outputs = self.recorder.activate(self._outputs(x, weights, position))
        return self.settings.rounding(outputs, self.last) if compressed else outputs

    def _outputs(self, x: Tensor, weights: dict[str, Tensor], position: int) -> list[Tensor]:
        """Outputs of the first projections for tokens x [n, C]."""
        return [x @ weights[name][position].to(x.dtype).T for name in self.first]

    def _forward(self, group: range, original: dict[str, Tensor], compressed: dict[str, Tensor]) -> None:
        """Add the outputs of the group's experts to every stream, in place."""
        for stream, routes in zip(self.streams, self.routes, strict=True):
            weights = compressed if stream.compressed else original
            for position, expert in enumerate(group):
                for tokens, share in routes.pieces(expert, self.cap):
                    x = stream.inputs.gather(tokens, self.settings.device)
                    inputs = self._activations(x, weights, position, stream.compressed)
                    y = inputs @ weights[self.last][position].to(x.dtype).T
                    y = y * (share * self.factor).to(y.device, y.dtype)[:, None]
                    if not bool(torch.isfinite(y).all()):
                        raise CalibrationError(f"expert {expert} of '{self.layer.name}' computes NaN or infinity")
                    stream.hidden.add(tokens, y)
