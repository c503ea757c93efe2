"""Channels tensors written only from docs/format.md, section 10, and their layer in float64.

Slow and simple: one half-byte at a time.
"""

import struct
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

GROUP = 64


@dataclass
class Tensor:
    """The content of a blob.

    Attributes:
        bits: 4, 8 or 16.
        codes: [E, I, 2 H] signed; of 16 bits, those of bfloat16 values.
        scales: [E, I, 2, G] float32; none of 16 bits.
        thresholds: [E] float32.
    """

    bits: int
    codes: NDArray[np.int64]
    scales: NDArray[np.float32]
    thresholds: NDArray[np.float32]

    def weights(self) -> NDArray[np.float32]:
        """Dequantize, rounded to float32 once: [E, I, 2 H]."""
        if self.bits == 16:
            return (self.codes.astype(np.uint32) << 16).view(np.float32)
        experts, channels, columns = self.codes.shape
        half = columns // 2
        codes = self.codes.reshape(experts, channels, 2, half).astype(np.float32)
        return (codes * self.scales[..., np.arange(half) // GROUP]).reshape(self.codes.shape)


def _bf16(values: NDArray[np.float32]) -> bytes:
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def _half(bits: int, codes: NDArray[np.int64]) -> bytes:
    padded = np.concatenate([codes, np.zeros(-len(codes) % GROUP, np.int64)])
    if bits == 16:
        return padded.astype("<u2").tobytes()
    if bits == 8:
        return padded.astype(np.int8).tobytes()
    groups = (padded + 8).reshape(-1, 2, GROUP // 2)
    return (groups[:, 0] + 16 * groups[:, 1]).astype(np.uint8).tobytes()


def _filled(data: bytes) -> bytes:
    return data + bytes(-len(data) % 64)


def write(tensor: Tensor) -> bytes:
    """The bytes of a tensor."""
    experts, channels, columns = tensor.codes.shape
    header = struct.pack("<8sHB5xQQQ", b"MOEPCHNL", 1, tensor.bits, experts, channels, columns // 2)
    out = header.ljust(128, b"\0") + _filled(tensor.thresholds.astype("<f4").tobytes())
    for expert in range(experts):
        for channel in range(channels):
            halves = np.split(tensor.codes[expert, channel], 2)
            record = b"".join(_half(tensor.bits, half) for half in halves)
            out += _filled(record + (b"" if tensor.bits == 16 else _bf16(tensor.scales[expert, channel])))
    return out


def layer(
    up: torch.Tensor,
    records: torch.Tensor,
    thresholds: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    deciding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """FloE's equation 11, token by token, in float64: up [E, I, H], records [E, I, 2 H], x [T, H], index [T, k].

    `deciding` [T, H] decides over channels in place of x. The number is that of the channels that were computed.
    """
    deciding = x if deciding is None else deciding
    outputs, computed = torch.zeros_like(x, dtype=torch.float64), 0
    for token, slot in (index < len(up)).nonzero().tolist():
        expert, y = index[token, slot], x[token].double()
        own = up[expert].double()
        kept = (own @ deciding[token].double()).abs() >= thresholds[expert]
        gate, down = records[expert].double().chunk(2, dim=1)
        h = torch.nn.functional.silu(gate[kept] @ y) * (own[kept] @ y)
        outputs[token] += weights[token, slot] * (down[kept].T @ h)
        computed += int(kept.sum())
    return outputs, computed


def refined_layer(
    coarse: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    residuals: torch.Tensor,
    thresholds: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    deciding: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """Coarse copies with refined channels, like `layer`: gate and up [E, I, H] and down [E, H, I] are `coarse`,
    residuals are [E, I, 2 H]. Also returns the number of refined channels."""
    deciding, silu = x if deciding is None else deciding, torch.nn.functional.silu
    outputs, count = torch.zeros_like(x, dtype=torch.float64), 0
    for token, slot in (index < len(residuals)).nonzero().tolist():
        expert, share, y, z = index[token, slot], weights[token, slot], x[token].double(), deciding[token].double()
        gate, up, down = (matrix[expert].double() for matrix in coarse)
        rows, columns = residuals[expert].double().chunk(2, dim=1)
        refined = (silu(gate @ z) * (up @ z)).abs() * share >= thresholds[expert]
        inner = silu(torch.where(refined, (gate + rows) @ y, gate @ y)) * (up @ y)
        outputs[token] += share * (down @ inner + columns[refined].T @ inner[refined])
        count += int(refined.sum())
    return outputs, count
