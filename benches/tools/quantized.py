"""Quantized weights of a checkpoint: the common part of all quantizers here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass
class Quantized:
    """Weights as used by the quantizer's runtime.

    Attributes:
        weights: tensors that replace the checkpoint's, in float32, by the names of transformers' model.
        sizes: by tensor, its bits with all metadata counted, and its number of weights.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, tuple[float, int]] = field(default_factory=dict)

    def put(self, name: str, weight: Tensor, bits: float) -> None:
        """Add a tensor and its size in bits."""
        self.weights[name] = weight.detach().float().cpu().contiguous()
        self.sizes[name] = float(bits), weight.numel()


def is_embedding(name: str) -> bool:
    """Whether a tensor is the embedding or the head."""
    return "embed_tokens" in name or "lm_head" in name


def opened(model: Path, dtype: torch.dtype, device: str) -> Any:
    """The checkpoint as transformers' model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()


def linear_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """The projections of all layers of a dense model, by name; not the head."""
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            yield name, module
