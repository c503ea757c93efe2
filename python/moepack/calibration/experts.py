"""Runs the experts of one block in groups, and yields the projections to compress, stage by stage.

The tokens of a group are gathered, the group's weights are replaced by compressed ones, and the outputs of the
compressed experts are added to the hidden states of each stream. The next block is therefore calibrated on the outputs
of compressed experts. A *stream* is the forward pass of one model: the compressed one, or the original one.

Invariant: one group's weights are in memory at a time; results depend on the group size only through the order of
floating-point sums. Groups do not depend on each other's outputs, so each may be solved in another process (`apart`)
from the rows that its experts read (`shard`), and its outputs added here (`add`) in the order of the groups, which
gives bit-identical sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from moepack.arrays import magnitude
from moepack.calibration.activations import Activations, budget
from moepack.calibration.buffer import ListBuffer
from moepack.calibration.moments import Gram, Moments, Tokens, expert_moments, sensitivity
from moepack.calibration.recorder import Recorder
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.stage import Inputs, LayerRun, Stage, enough_memory
from moepack.calibration.stream import Additions, Stream
from moepack.checkpoint import MoeLayer
from moepack.errors import CalibrationError, DeviceMemoryError
from moepack.solvers.products import product

__all__ = ["ExpertsRun", "Shard", "waves_of"]

Group = dict[str, Tensor]
"""Weights of a group of experts by projection, [G, R, C]."""
GROWTH = 7
"""Largest size of a wave, relative to the groups before it. Solved groups predict the size of `GROWTH` times as many
others to within a fraction of a group."""

PIECE = 16 << 20
"""Largest float32 tensor of the tokens of an expert that are processed together, in bytes. A few times as much is in
use at the same time."""

Solved = Generator[Stage, None, tuple[Group, Group, Activations] | None]
"""Yields the stages of a group; returns its original and compressed weights, and activations, or None for a preview."""


@dataclass
class _Routes:
    """Assignment of rows to experts: positions [n] sorted by expert, with their router weights."""

    tokens: Tensor
    weights: Tensor
    starts: list[int]

    @classmethod
    def of(cls, stream: Stream, experts: int, keep: Tensor | None = None) -> _Routes:
        """Sort the choices [T, k] of a stream's router by expert; `keep` [T] bool selects tokens."""
        choices = stream.index.flatten().long()
        wanted = choices >= 0
        if keep is not None:
            wanted &= keep.to(choices.device).repeat_interleave(stream.index.shape[1])
        where = wanted.nonzero().flatten()
        order = torch.argsort(choices[where], stable=True)
        where = where[order]
        counts = torch.bincount(choices[where], minlength=experts)
        starts = [0, *counts.cumsum(0).tolist()]
        return cls(where // stream.index.shape[1], stream.weights.flatten()[where], starts)

    def part(self, group: range) -> _Routes:
        """Return the rows of a group of experts; the others have none."""
        first, last = self.starts[group.start], self.starts[group.stop]
        starts = [min(max(start, first), last) - first for start in self.starts]
        return _Routes(self.tokens[first:last], self.weights[first:last], starts)

    def pieces(self, expert: int, cap: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens and weights of an expert, at most `cap` at a time."""
        for first in range(self.starts[expert], self.starts[expert + 1], cap):
            last = min(first + cap, self.starts[expert + 1])
            yield self.tokens[first:last], self.weights[first:last]


@dataclass(frozen=True)
class Shard:
    """What the experts of a group read, in CPU memory.

    Attributes:
        rows: [n] int64, the rows in the whole calibration set, ascending.
        inputs: by stream, these rows, [n, H].
        routes: by stream, the rows of each expert, as positions in `rows`.
        counted: the rows that count for Hessians.
    """

    rows: Tensor
    inputs: list[Tensor]
    routes: list[_Routes]
    counted: _Routes


def waves_of(groups: Sequence[range]) -> list[Sequence[range]]:
    """Divide the groups of a layer into waves.

    The first wave is one group, on which a method calibrates its estimates. The last wave is one group, too, which
    compensates for the errors of the estimates. Each wave between them has at most `GROWTH` times the groups before it.
    """
    waves, done = [groups[:1]], 1
    while done < len(groups) - 1:
        size = min(GROWTH * done, len(groups) - 1 - done)
        waves.append(groups[done : done + size])
        done += size
    return [wave for wave in [*waves, groups[done:]] if wave]


class ExpertsRun(LayerRun):
    """The experts of a block, after attention and the other dense layers of the block have run.

    Attributes:
        groups: groups of experts that are quantized together, in order.
    """

    def __init__(
        self,
        settings: CalibrationSettings,
        layer: MoeLayer,
        recorder: Recorder,
        streams: list[Stream],
        mask: Tensor,
        factor: float,
    ) -> None:
        """Sort the tokens by expert.

        Args:
            settings: settings of the calibration.
            layer: the layer.
            recorder: computes the operations between the projections (such as the activation) and after the last one.
            streams: hidden states of the compressed model and, if the original model runs too, of the original (last).
            mask: [N] bool, rows that count for Hessians.
            factor: multiplies the experts' outputs before they are added to the hidden states.
        """
        super().__init__(layer)
        self.settings, self.recorder, self.streams, self.factor = settings, recorder, streams, factor
        size = settings.group
        self.groups = [range(i, min(i + size, layer.experts)) for i in range(0, layer.experts, size)]
        self.waves = waves_of(self.groups)
        self._routes = [_Routes.of(stream, layer.experts) for stream in streams]
        self._counted = _Routes.of(streams[-1 if settings.routing == "original" else 0], layer.experts, mask)
        self.tokens = torch.tensor(self._counted.starts).diff()
        most = int(settings.token_cap * len(self._routes[0].tokens) / max(layer.experts, 1))
        widest = max((size for tensor in self.tensors.values() for size in tensor.shape[1:]), default=1)
        self._cap = max(1, min(most, PIECE // (4 * max(widest, 1))))
        *self._first, self._last = [projection.name for projection in layer.projections]
        self._shard: Shard | None = None

    def apart(self) -> ExpertsRun:
        """Return a copy of this run for other processes, without any states."""
        found = copy(self)
        found.streams = [Stream(stream.compressed, ListBuffer([], 1)) for stream in self.streams]
        found._routes, found._counted = [], _Routes(torch.empty(0), torch.empty(0), [])
        return found

    def shard(self, group: range) -> Shard:
        """Return what the experts of a group read."""
        *routes, counted = (own.part(group) for own in (*self._routes, self._counted))
        rows = torch.unique(torch.cat([own.tokens for own in (*routes, counted)]))
        *routes, counted = (
            _Routes(torch.searchsorted(rows, own.tokens).cpu(), own.weights.cpu(), own.starts)
            for own in (*routes, counted)
        )
        inputs = [stream.inputs.gather(rows).cpu() for stream in self.streams if stream.inputs is not None]
        return Shard(rows.cpu(), inputs, routes, counted)

    def only(self, group: range, shard: Shard) -> ExpertsRun:
        """Return the run of one group from a result of `apart`; outputs of its experts are collected in `additions`."""
        found = copy(self)
        found.groups, found.tensors, found.waves, found.largest = [group], dict(self.tensors), (), 0.0
        found._shard, found._routes, found._counted = shard, shard.routes, shard.counted
        found.streams = [
            replace(stream, inputs=ListBuffer.of(inputs), sums=Additions())
            for stream, inputs in zip(self.streams, shard.inputs, strict=True)
        ]
        return found

    def _whole(self, rows: Tensor) -> Tensor:
        """Return rows in the whole calibration set."""
        return rows if self._shard is None else self._shard.rows[rows]

    @property
    def additions(self) -> list[Additions]:
        """The additions of a separately solved group to the sums of each stream."""
        return [stream.sums for stream in self.streams if isinstance(stream.sums, Additions)]

    def add(self, additions: Sequence[Additions], largest: float) -> None:
        """Add the outputs of a separately solved group, and its `largest`. All groups must be added, in order."""
        self.largest = max(self.largest, largest)
        for stream, added in zip(self.streams, additions, strict=True):
            assert stream.sums is not None
            for rows, outputs in added.made:
                stream.sums.add(rows, outputs)

    def _stages(self) -> Iterator[Stage]:
        yield from self._groups(self._solve)

    def rows(self) -> tuple[Tensor, Tensor] | None:
        """See `LayerRun`."""
        assert self._shard is None, "a shard has the rows of one group"
        stream = self.streams[0]
        return None if stream.inputs is None else (stream.inputs.tokens, stream.index)

    @torch.no_grad()
    def previews(self) -> Iterator[Stage]:
        """See `LayerRun`."""
        yield from self._groups(self._preview)

    def _groups(self, work: Callable[[range], Solved]) -> Iterator[Stage]:
        """Yield the stages of all groups; a group that exceeds device memory is halved."""
        device, pending = self.settings.device, [*self.groups]
        while pending:
            group = pending.pop(0)
            try:
                solved = yield from work(group)
            except torch.OutOfMemoryError as error:
                if len(group) == 1:
                    message = f"{device} has too little memory for one expert of '{self.layer.name}'"
                    raise DeviceMemoryError(message) from error
                half = len(group) // 2
                pending[:0] = [group[:half], group[half:]]
                continue
            if solved is not None:
                with enough_memory(device, f"the tokens of one expert of '{self.layer.name}'"):
                    self._forward(group, *solved)
                solved[2].clear()

    @property
    def _budget(self) -> int:
        """Bytes of the activations of a group."""
        return budget(sum(math.prod(tensor.shape) for tensor in self.tensors.values())) if self._first else 0

    def _solve(self, group: range) -> Solved:
        original, kept = self._weights(group), Activations(self._budget)
        values: Group = {}
        if self._first:
            yield self._stage(group, self._first, original, None, kept)
            values = self._answered(self._first)
        last, compressed = len(self.streams) - 1, self.streams[0].compressed
        feeding = values if compressed else original
        if not self.streams[last].compressed:
            self._keep(last, group, original, kept)
        yield self._stage(group, [self._last], original, feeding, kept)
        if compressed or last:
            self._keep(0, group, feeding, kept)
        return original, {**values, **self._answered([self._last])}, kept

    def _keep(self, stream: int, group: range, weights: Group, kept: Activations) -> None:
        """Keep activations that the moments of a stage keep, in the same order.

        Moments are not computed for tensors that a resumed job has packed. Products of other numbers of rows round
        differently, so their outputs would not be those of the job without an interruption.
        """
        if not self._first:
            return
        columns, compressed = self.tensors[self._last].shape[-1], self.streams[stream].compressed
        for position, expert in enumerate(group):
            for tokens, _ in self._counted.pieces(expert, self._cap):
                if kept.takes(stream, expert, tokens, len(tokens) * columns * self.settings.dtype.itemsize):
                    x = self._rows(stream, tokens)
                    kept.keep(stream, expert, tokens, self._activations(x, weights, group, position, compressed))

    def _preview(self, group: range) -> Solved:
        original = self._weights(group)
        for names, feeding in (self._first, None), ([self._last], original):
            if not names:
                continue
            self._answer = {}
            yield self._stage(group, names, original, feeding, Activations(0))
            self._take()
        return None

    def _weights(self, group: range) -> Group:
        """Return the group's original weights, float32 on the device."""
        device, found = self.settings.device, {}
        for name, tensor in self.tensors.items():
            found[name] = torch.empty(len(group), *tensor.shape[1:], device=device)
            for out, expert in zip(found[name], group, strict=True):
                out.copy_(tensor.expert(expert, device))
        return found

    def _answered(self, names: list[str]) -> Group:
        values = self._take()
        return {name: values[name].to(self.settings.device, self.settings.dtype) for name in names}

    def _stage(
        self, group: range, names: list[str], original: Group, feeding: Group | None, kept: Activations
    ) -> Stage:
        """Return a stage.

        Args:
            group: the experts.
            names: the projections.
            original: the weights of all projections.
            feeding: the weights of the preceding projections; None for the first projections.
            kept: receives the activations.
        """
        weights = {name: original[name] for name in names}
        columns, device = weights[names[0]].shape[-1], self.settings.device

        def pieces(position: int) -> Iterator[Tensor]:
            for tokens, _ in self._counted.pieces(group[position], self._cap):
                x = self._rows(0, tokens)
                yield (
                    x if feeding is None else self._activations(x, feeding, group, position, self.streams[0].compressed)
                )

        def weights_of(position: int) -> Iterator[Tensor]:
            return (share for _, share in self._counted.pieces(group[position], self._cap))

        def rows(position: int) -> Iterator[Tensor]:
            return (self._whole(tokens) for tokens, _ in self._counted.pieces(group[position], self._cap))

        def hessians() -> Tensor:
            result = torch.zeros(len(group), columns, columns, device=device)
            for position in range(len(group)):
                gram = Gram(columns, device)
                for piece in pieces(position):
                    gram.add(piece.float())
                gram.write(result[position])
            return result

        def moments(drift: bool) -> Moments:
            tokens = [self._tokens(group, position, original, feeding, kept) for position in range(len(group))]
            return expert_moments(tokens, columns, device, drift)

        assert self.tokens is not None
        inputs = Inputs(self.tokens[group.start : group.stop], pieces, hessians, moments, weights_of, rows)
        return Stage(self.layer.name, {name: self.tensors[name] for name in names}, group, weights, inputs)

    def _tokens(
        self, group: range, position: int, original: Group, feeding: Group | None, kept: Activations
    ) -> Iterator[Tokens]:
        """Yield, in pieces, the inputs of one expert in both models (compressed, original), and token weights.

        The weights follow from the original model's activations, which the next stage and the outputs read as well.
        """
        expert, last = group[position], len(self.streams) - 1
        compressed, other = self.streams[0].compressed, self.streams[last].compressed
        for tokens, share in self._counted.pieces(expert, self._cap):
            counts = share.to(self.settings.device).float().square()

            def after(rows: Tensor) -> Tensor:
                return self._activations(self._rows(last, rows), original, group, position)

            if feeding is None:
                x = self._rows(0, tokens)
                before = self._rows(last, tokens) if last else x
                parts, between = self._outputs(before, original, position), partial(self._between, expert)
                counts = counts * sensitivity(parts, between, original[self._last][position])
                if not other:
                    kept.keep(last, expert, tokens, between(parts))
                yield Tokens(x, before, counts)
                continue
            originals = after(tokens) if other else kept.of(last, expert, tokens, after)
            inputs = originals
            if compressed or last:
                inputs = self._activations(self._rows(0, tokens), feeding, group, position, compressed)
                kept.keep(0, expert, tokens, inputs)
            yield Tokens(inputs, originals, counts)

    def _rows(self, stream: int, rows: Tensor) -> Tensor:
        """Return the inputs of the experts, on the device."""
        inputs = self.streams[stream].inputs
        assert inputs is not None
        return inputs.gather(rows, self.settings.device)

    def _activations(self, x: Tensor, weights: Group, group: range, position: int, compressed: bool = False) -> Tensor:
        """Return inputs of the last projection for tokens x [n, C]; rounded in the compressed model."""
        if not self._first:
            return x
        outputs = self._between(group[position], self._outputs(x, weights, position))
        return self.settings.rounding(outputs, self._last) if compressed else outputs

    def _between(self, expert: int, parts: Sequence[Tensor]) -> Tensor:
        return self.recorder.between(parts, expert)

    def _outputs(self, x: Tensor, weights: Group, position: int) -> list[Tensor]:
        """Return outputs of the first projections for tokens x [n, C]."""
        return [product(x, weights[name][position].to(x.dtype)) for name in self._first]

    def _forward(self, group: range, original: Group, compressed: Group, kept: Activations) -> None:
        """Add the outputs of the group's experts to every stream's sums, in place."""
        for number, (stream, routes) in enumerate(zip(self.streams, self._routes, strict=True)):
            weights = compressed if stream.compressed else original
            assert stream.sums is not None
            for position, expert in enumerate(group):
                for rows, share in routes.pieces(expert, self._cap):

                    def compute(
                        rows: Tensor, number: int = number, weights: Group = weights, position: int = position
                    ) -> Tensor:
                        x = self._rows(number, rows)
                        return self._activations(x, weights, group, position, self.streams[number].compressed)

                    inputs = kept.of(number, expert, rows, compute)
                    y = self.recorder.behind(product(inputs, weights[self._last][position].to(inputs.dtype)), expert)
                    largest = max(magnitude(inputs), magnitude(y))
                    if not math.isfinite(largest):
                        raise CalibrationError(f"expert {expert} of '{self.layer.name}' computes NaN or infinity")
                    self.largest = max(self.largest, largest)
                    y = y * (share * self.factor).to(y.device, y.dtype)[:, None]
                    stream.sums.add(self._whole(rows), y)
