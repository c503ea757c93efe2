"""Cases of codebook weights: activations unchanged, rounded to 8 and 4 bits, and rotated."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benches.gpu.cases import repeated
from moepack import _core

ERROR = 2.0**-12
"""The bound of relative errors: an activation is rounded by at most 2^-15 of the power of two above the largest of 128
columns, which of normal columns is below 8 root mean squares."""

LINEAR_ERROR = 2.0**-11
"""The bound of relative errors of linear layers, whose kernels may round centroids to f16: by at most 2^-11 of each, so
that no sum of the magnitudes of products is off by more."""


def make(
    experts: int, rows: int, columns: int, seed: int, *, bits: int, activation_bits: int, block: int, rotated: bool
) -> NDArray[np.uint8]:
    """A packed tensor of random codes and centroids; above 2^22 weights, 512 rows repeat."""
    large = experts * rows * columns > 1 << 22
    shape = (1, 512) if large else (experts, rows)
    random = np.random.default_rng(seed)
    blocks = -(-columns // block) if block else 1
    centroids = random.integers(-32639, 32640, (*shape, blocks, 1 << bits), dtype=np.int16)
    if activation_bits:
        centroids = (np.round(centroids / 257).astype(np.int16) * 256).astype(np.int16)
    scales = random.uniform(0.5, 1.5, (*shape, blocks)).astype(np.float32) * np.float32(5e-5 * columns**-0.5)
    codes = random.integers(0, 1 << bits, (*shape, columns), dtype=np.uint8)
    width = columns & -columns if rotated else 1
    data = _core.encode_codebook(
        codes, centroids, scales, bits=bits, block=block or 1 << 20, ndim=3, activation_bits=activation_bits,
        hadamard=width,
    )  # fmt: skip
    return repeated(data, experts, rows) if large else data


def seen(details: Mapping[str, Any], x: Tensor) -> Tensor:
    """The activations [N, C] as products see them, float64: rotated, rounded on the CPU's grid, rotated back."""
    width, bits = details["hadamard"], details["activation_bits"]
    if not bits:
        return x.double()
    values = _rotated(x.float(), width)
    low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
    # A tensor: torch multiplies by the inverse of a number.
    top = torch.full_like(low, (1 << bits) - 1)
    step = (high - low) / top
    inverse = 1 / step
    zero = (-low * inverse + 0.5).floor().clamp(min=0).minimum(top)
    codes = (values * inverse + (zero + 0.5)).clamp(min=0).minimum(top).floor()
    return _rotated((step * (codes - zero)).double(), width)


def _rotated(x: Tensor, width: int) -> Tensor:
    """Multiply each `width` columns by Hadamard's matrix, in the core's order of operations."""
    if width == 1:
        return x
    parts, half = x.reshape(-1, width), 1
    while half < width:
        pairs = parts.view(-1, width // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        parts = torch.stack((first + second, first - second), 2).view(-1, width)
        half *= 2
    return (parts * (1 / torch.tensor(float(width), dtype=x.dtype).sqrt())).view(x.shape)


def _name(bits: int, activation_bits: int, block: int, rotated: bool) -> str:
    parts = [
        f"codebook {bits} bits A{activation_bits or 16}",
        f"block {block}" if block else "",
        "rotated" if rotated else "",
    ]
    return " ".join(part for part in parts if part)


SPECIFICATIONS = {
    _name(*key): partial(make, bits=key[0], activation_bits=key[1], block=key[2], rotated=key[3])
    for key in [*product((4, 3, 2), (0, 8), (0,), (False,)), (4, 0, 128, False), (4, 4, 256, True), (2, 8, 0, True)]
}
