"""ggml's types as a method: ggml itself rounds matrices, with an importance matrix, and reads them back.

The importance of a column is the mean square of the original model's inputs in this column, per expert, as collected
by llama.cpp's `llama-imatrix`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benches.tools import ggml

TYPES = {
    "IQ1_S": 19, "IQ1_M": 29, "IQ2_XXS": 16, "IQ2_XS": 17, "IQ2_S": 22, "Q2_K": 10, "IQ3_XXS": 18, "IQ3_S": 21,
    "Q3_K": 11, "IQ4_XS": 23, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
}  # fmt: skip
"""Numbers of the types of blocks of 256 columns (`ggml_type`)."""

UNSEEN = 1e-6
"""Importance, relative to the mean, of columns and experts that the text never reaches."""


class GgmlTypes:
    """Rounds matrices to the types of ggml; ImportError if no package with ggml is installed."""

    def __init__(self) -> None:
        self.library = ggml.load()

    def bits(self, kind: str) -> float:
        """Bits per weight of a type."""
        return 8 * self.library.ggml_row_size(TYPES[kind], 256) / 256

    def rounded(self, kind: str, matrices: Tensor, importance: Tensor) -> Tensor:
        """Round [E, R, C] to a type and back, float32; `importance` is [E, C], C a multiple of 256."""
        values, weights = (tensor.float().contiguous().numpy() for tensor in (matrices, importance))
        library, number = self.library, TYPES[kind]
        blocks = (ggml.quantized(library, number, *pair) for pair in zip(values, weights, strict=True))
        found = [ggml.dequantized(library, number, each, values.shape[2]) for each in blocks]
        return torch.from_numpy(np.stack(found))


def importances(model: nn.Module, layers: Iterable[str], samples: Tensor) -> dict[str, Tensor]:
    """Mean squares of the inputs of each expert, [E, H] by layer name, on samples [N, L] of token ids."""
    sums: dict[str, Tensor] = {}
    with torch.no_grad(), _listening(model, layers, sums):
        for sample in samples:
            model(input_ids=sample[None], use_cache=False)
    return {name: found + UNSEEN * found.mean() for name, found in sums.items()}


@contextmanager
def _listening(model: nn.Module, layers: Iterable[str], sums: dict[str, Tensor]) -> Iterator[None]:
    """Adds the squared inputs of experts of transformers' interface to `sums`."""

    def note(name: str, module: Any, given: tuple[Tensor, ...]) -> None:
        tokens, chosen = given[0].flatten(0, -2).square(), given[1]
        found = sums.setdefault(name, torch.zeros(module.num_experts, tokens.shape[1]))
        found.index_add_(0, chosen.flatten(), tokens.repeat_interleave(chosen.shape[-1], 0))

    hooks = [model.get_submodule(name).register_forward_pre_hook(partial(note, name)) for name in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
