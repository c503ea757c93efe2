"""Measures a method on a model: coded bits per weight and loss increase, on any device.

The method packs every layer as in `moepack compress`; bits are those of the packed bytes, including all metadata.
Losses are those of `moepack.evaluate` with the packed values in transformers' own model, so that they can be measured
on a GPU, where packed bytes cannot be read yet."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepack import _core, evaluate
from moepack.calibration.stage import Weights, layer_tensors
from moepack.checkpoint import Checkpoint, MoeLayer, describe
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods import Method, PackedBytes
from moepack.pipeline import Assignment
from moepack.pipeline.solving import LayerPacker


class MethodLoss:
    """One model and its original losses on several texts, to measure methods with."""

    def __init__(self, path: Path, texts: list[Path], chars: int, device: str = "cpu") -> None:
        """Load the model in float32 and measure it on the first `chars` characters of each text."""
        self.name, self.texts, self.chars = path.name, texts, chars
        self.checkpoint = Checkpoint.open(path)
        self.layout = describe(self.checkpoint)
        self.model = open_model(path, torch.float32).to(device)
        self.tokenizer = open_tokenizer(path)
        self.original = self.losses()

    def losses(self) -> dict[str, float]:
        """Nats per token of the current model, by text."""
        return {text.stem: evaluate(self.model, text, self.chars, tokenizer=self.tokenizer).loss for text in self.texts}

    def measure(
        self, method: Method, only: Collection[str] | None = None, runs: list[Any] | None = None
    ) -> dict[str, Any]:
        """Pack all experts, or only the given projections; return their bits per weight, the loss increase by text
        in nats per token, and the seconds of packing. Layers run as in the method's calibration, or as given."""
        start = time.perf_counter()
        planned = Assignment(method).planned(self.checkpoint, self.layout)
        packer = LayerPacker(self.checkpoint, self.layout, planned)
        bits = weights = 0
        for layer, run in zip(packer.layers, runs or packer.runs(), strict=True):
            assert isinstance(layer, MoeLayer), "experts only"
            kept = {name: _exact(each) for name, each in layer_tensors(layer).items() if only and name not in only}
            packed = packer.pack(layer, run, kept)
            packer.record_sizes(layer, packed)
            bits += sum(8 * tensor.data.nbytes for name, tensor in packed.items() if name not in kept)
            weights += sum(math.prod(part.shape) for part in layer.projections if part.name not in kept)
            blobs = {name: _core.PackedTensor(tensor.data) for name, tensor in packed.items()}
            self._put(layer, {name: torch.from_numpy(blob.dequantize()) for name, blob in blobs.items()})
        return self._figures(bits / weights, start)

    def replace(
        self, bits: float, rounded: Callable[[str, str, Tensor], Tensor], only: Collection[str] | None = None
    ) -> dict[str, Any]:
        """Figures like those of `measure` at the given bits; `rounded` maps the experts [E, R, C] of a layer and
        projection to values."""
        start = time.perf_counter()
        for layer in self.layout.layers:
            stacks = {name: _stack(weights) for name, weights in layer_tensors(layer).items()}
            changed = {name: rounded(layer.name, name, stacks[name]) for name in stacks if not only or name in only}
            self._put(layer, stacks | changed)
        return self._figures(bits, start)

    def _figures(self, bits: float, start: float) -> dict[str, Any]:
        seconds = time.perf_counter() - start
        rise = {name: loss - self.original[name] for name, loss in self.losses().items()}
        return {"bits_per_weight": bits, "rise": rise, "seconds": round(seconds, 1)}

    def _put(self, layer: MoeLayer, values: dict[str, Tensor]) -> None:
        """Set the weights of the model."""
        module = self.model.get_submodule(layer.name)
        if "wi" in values:
            for name, stack in values.items():
                for expert, matrix in enumerate(stack):
                    _fill(module.get_submodule(f"expert_{expert}.{name}").weight, matrix)
        else:
            _fill(module.gate_up_proj, torch.cat([values["gate_proj"], values["up_proj"]], dim=1))
            _fill(module.down_proj, values["down_proj"])


def _exact(weights: Weights) -> PackedBytes:
    """A tensor, exact up to 2^-25 of its largest weight."""
    values = _stack(weights)
    scale = values.abs().amax().clamp(min=1e-30) * 2.0**-24
    codes = (values / scale).round().int()
    return PackedBytes("coded", _core.encode_coded(codes.numpy(), scale.view(1, 1).numpy(), ndim=3))


def _stack(weights: Weights) -> Tensor:
    return torch.stack([weights.expert(expert).float() for expert in range(weights.shape[0])])


def _fill(parameter: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)
