"""The linear layers of a block, before its experts: what each one reads, and their replacement in the compressed model.

Layers that read the same input form a stage (query, key and value projections; gate and up projections of a shared
expert). Stages are solved in the order in which the block runs them: the moments of a stage are gathered with the
earlier ones already compressed, so errors inside a block are seen as well as those of blocks before it.

Invariant: outside of `compressed`, the block holds its original weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration.moments import Moments, Tokens, expert_moments
from moepack.checkpoint.dense import DenseLayer
from moepack.errors import UnsupportedModelError
from moepack.solvers.activations import Rounding

__all__ = ["LinearStage", "Linears", "SolveLinears"]

Runs = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Runs a block over all batches of stream i (0: compressed, -1: original); gives for each batch, when it is done, the
masks [B L] of the positions that count: those of the block's own states, and in a decoder those of the encoder's states
(the same mask elsewhere)."""

_READS_ENCODER = re.compile(r"\.EncDecAttention\.[kv]$")


@dataclass(frozen=True)
class LinearStage:
    """Linear layers of a block that read the same input.

    Attributes:
        layer: the block's linear layers.
        weights: by path, [1, R, C] float32 on the device.
        moments: computes the moments of the input, as of one expert; zero drift where one stream runs.
    """

    layer: DenseLayer
    weights: dict[str, Tensor]
    moments: Callable[[], Moments]


SolveLinears = Callable[[LinearStage], dict[str, Tensor]]
"""Turns a stage into compressed weights, [1, R, C] by path."""


class Linears:
    """The linear layers of a block that is loaded."""

    def __init__(self, layer: DenseLayer, block: nn.Module, path: str, rounding: Rounding) -> None:
        """Find the layers of `layer` in the block at `path`.

        Raises:
            UnsupportedModelError: one of them is no `nn.Linear`.
        """
        self.layer, self.rounding = layer, rounding
        self.modules: dict[str, nn.Linear] = {}
        for linear in layer.linears:
            module = block.get_submodule(linear.name.removeprefix(f"{path}."))
            if not isinstance(module, nn.Linear):
                raise UnsupportedModelError(f"'{linear.name}' is a {type(module).__name__}, not a linear layer")
            self.modules[linear.name] = module
        self.values: dict[str, Tensor] = {}

    def stages(self, runs: Runs) -> list[list[str]]:
        """The paths in the order in which the block runs them, those of one input together."""
        inputs: list[Tensor] = []
        stages: list[list[str]] = []

        def note(path: str, x: Tensor) -> Tensor:
            for known, stage in zip(inputs, stages, strict=True):
                if known is x:
                    stage.append(path)
                    return x
            inputs.append(x)
            stages.append([path])
            return x

        with self._hooked(list(self.modules), note):
            next(runs(0))
        silent = set(self.modules) - {path for stage in stages for path in stage}
        if silent:
            raise UnsupportedModelError(f"the block does not run '{min(silent)}'")
        return stages

    def solve(self, runs: Runs, streams: Sequence[int], solve: SolveLinears) -> None:
        """Compress all stages; `streams` are the streams to take moments from, the compressed one first."""
        for names in self.stages(runs):
            weights = {name: self.modules[name].weight.detach().float()[None] for name in names}
            moments = partial(self._moments, runs, streams, names[0])
            found = solve(LinearStage(self.layer, weights, moments))
            for name in names:
                self.values[name] = found[name][0].to(self.modules[name].weight)

    def _moments(self, runs: Runs, streams: Sequence[int], path: str) -> Moments:
        columns = self.modules[path].in_features
        device = self.modules[path].weight.device
        pairs = zip(*(self._inputs(runs, stream, path) for stream in streams), strict=True)
        tokens = (Tokens(pair[0], pair[-1], torch.ones(len(pair[0]), device=device)) for pair in pairs)
        return expert_moments([tokens], columns, device)

    def _inputs(self, runs: Runs, stream: int, path: str) -> Iterator[Tensor]:
        """What a layer reads, [n, C] a batch."""
        seen: list[Tensor] = []

        def note(_: str, x: Tensor) -> Tensor:
            seen.append(x)
            return x

        steps = runs(stream)
        while True:
            # Streams take turns, so a block must hold the weights of its stream for one batch at a time.
            with self.compressed(stream == 0), self._hooked([path], note):
                done = next(steps, None)
            if done is None:
                return
            x = torch.cat([part.flatten(0, -2) for part in seen])
            seen.clear()
            mask = done[1 if _READS_ENCODER.search(path) else 0]
            kept = x[mask.to(x.device)]
            yield self.rounding(kept, path) if stream == 0 else kept

    @contextmanager
    def _hooked(self, paths: list[str], note: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
        """Show the inputs of layers to `note`, which answers with what they shall read."""
        hooks = []
        for path in paths:

            def hook(_: nn.Module, given: tuple[Any, ...], path: str = path) -> tuple[Any, ...]:
                return (note(path, given[0]), *given[1:])

            hooks.append(self.modules[path].register_forward_pre_hook(hook))
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    @contextmanager
    def compressed(self, wanted: bool = True) -> Iterator[None]:
        """Let the layers that were solved compute as the packed ones will."""
        if not wanted:
            yield
            return
        kept = {path: self.modules[path].weight for path in self.values}
        try:
            for path, value in self.values.items():
                self.modules[path].weight = nn.Parameter(value, requires_grad=False)
            with self._hooked(list(self.values), lambda path, x: self.rounding(x, path)):
                yield
        finally:
            for path, weight in kept.items():
                self.modules[path].weight = weight
