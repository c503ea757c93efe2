"""The linear layers of a block, before its experts: their inputs, and their replacement in the compressed model.

Layers that read the same input form a stage (query, key and value projections; gate and up projections of a shared
expert). Stages are yielded in the order in which the block runs them. The moments of a stage are gathered with the
earlier stages already compressed, so they reflect errors inside a block as well as those of earlier blocks.

Invariant: outside of `compressed`, the block holds its original weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moepack.calibration.arguments import Stopped
from moepack.calibration.moments import Moments, Tokens, expert_moments
from moepack.calibration.stage import Inputs, LayerRun, Stage, enough_memory
from moepack.checkpoint.dense import DenseLayer
from moepack.errors import UnsupportedModelError
from moepack.solvers.activations import Rounding

__all__ = ["LinearsRun"]

Forward = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Runs a block over all batches of stream i (0: compressed, -1: original).

After each batch, yields the masks [B L] of the positions that count: those of the block's own states, and, in a
decoder, those of the encoder's states (otherwise the same mask). A hook ends the pass of a batch early by `Stopped`.
"""

_READS_ENCODER = re.compile(r"\.EncDecAttention\.[kv]$")


class LinearsRun(LayerRun):
    """The linear layers of a loaded block."""

    def __init__(
        self,
        layer: DenseLayer,
        block: nn.Module,
        path: str,
        rounding: Rounding,
        forward: Forward,
        streams: Sequence[int],
    ) -> None:
        """Find the layers of `layer` in the block at `path`.

        Args:
            layer: the linear layers to pack.
            block: the block's module.
            path: its path in the model.
            rounding: how the compressed layers round their inputs.
            forward: runs the block.
            streams: the streams from which moments are taken, the compressed one first.

        Raises:
            UnsupportedModelError: a layer is not an `nn.Linear`.
        """
        super().__init__(layer)
        self.rounding, self._forward, self._streams = rounding, forward, streams
        self.modules: dict[str, nn.Linear] = {}
        for linear in layer.linears:
            module = block.get_submodule(linear.name.removeprefix(f"{path}."))
            if not isinstance(module, nn.Linear):
                raise UnsupportedModelError(f"'{linear.name}' is a {type(module).__name__}, not a linear layer")
            self.modules[linear.name] = module
        self.values: dict[str, Tensor] = {}
        self._calls: dict[str, int] = {}

    def _stages(self) -> Iterator[Stage]:
        for names in self._order():
            weights = {name: self.modules[name].weight.detach().float()[None] for name in names}
            inputs = Inputs(
                torch.empty(0, dtype=torch.int64),
                partial(self._pieces, names[0]),
                lambda path=names[0]: self._moments(path, False).hessians,  # type: ignore[misc]
                partial(self._moments, names[0]),
            )
            yield Stage(self.layer.name, {name: self.tensors[name] for name in names}, range(1), weights, inputs)
            found = self._take()
            for name in names:
                self.values[name] = found[name][0].to(self.modules[name].weight)

    def _take(self) -> dict[str, Tensor]:
        with enough_memory(self._device, f"the linear layers of '{self.layer.name}'"):
            return dict(super()._take())

    @property
    def _device(self) -> torch.device:
        return next(iter(self.modules.values())).weight.device

    def _order(self) -> list[list[str]]:
        """Return the paths in the order in which the block runs them, grouped by input."""
        inputs: list[Tensor] = []
        stages: list[list[str]] = []

        def note(path: str, x: Tensor) -> Tensor:
            self._calls[path] = self._calls.get(path, 0) + 1
            for known, stage in zip(inputs, stages, strict=True):
                if known is x:
                    stage.append(path)
                    return x
            inputs.append(x)
            stages.append([path])
            return x

        with self._hooked(list(self.modules), note):
            next(self._forward(0))
        silent = set(self.modules) - {path for stage in stages for path in stage}
        if silent:
            raise UnsupportedModelError(f"the forward pass of the block does not use '{min(silent)}'")
        return stages

    @torch.no_grad()
    def _moments(self, path: str, drift: bool) -> Moments:
        columns, streams = self.modules[path].in_features, self._streams if drift else self._streams[:1]
        pairs = zip(*(self._inputs(stream, path) for stream in streams), strict=True)
        tokens = (Tokens(pair[0], pair[-1], torch.ones(len(pair[0]), device=self._device)) for pair in pairs)
        return expert_moments([tokens], columns, self._device, drift)

    def _pieces(self, path: str, _: int) -> Iterator[Tensor]:
        return self._inputs(0, path)

    def _inputs(self, stream: int, path: str) -> Iterator[Tensor]:
        """Yield the inputs of a layer, [n, C] per batch."""
        seen: list[Tensor] = []

        def note(_: str, x: Tensor) -> Tensor:
            seen.append(x)
            if len(seen) == self._calls[path]:
                raise Stopped  # the rest of the block is not needed
            return x

        batches = self._forward(stream)
        while True:
            # Streams alternate, so a block holds the weights of its stream for one batch at a time.
            with self.compressed(stream == 0), self._hooked([path], note):
                done = next(batches, None)
            if done is None:
                return
            x = torch.cat([part.flatten(0, -2) for part in seen])
            seen.clear()
            mask = done[1 if _READS_ENCODER.search(path) else 0]
            kept = x[mask.to(x.device)]
            yield self.rounding(kept, path) if stream == 0 else kept

    @contextmanager
    def _hooked(self, paths: list[str], note: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
        """Pass the inputs of layers to `note`, which returns the inputs to use instead."""
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
        """Make the solved layers compute like the packed ones."""
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
