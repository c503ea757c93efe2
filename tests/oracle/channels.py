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
    """What a blob holds.

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
) -> tuple[torch.Tensor, int]:
    """FloE's equation 11, token by token, in float64: up [E, I, H], records [E, I, 2 H], x [T, H], index [T, k]."""
    outputs, computed = torch.zeros_like(x, dtype=torch.float64), 0
    for token, chosen in enumerate(index.tolist()):
        for slot, expert in enumerate(chosen):
            if expert < len(up):
                v = up[expert].double() @ x[token].double()
                kept = v.abs() >= thresholds[expert]
                gate, down = records[expert].double().chunk(2, dim=1)
                h = torch.nn.functional.silu(gate[kept] @ x[token].double()) * v[kept]
                outputs[token] += weights[token, slot] * (down[kept].T @ h)
                computed += int(kept.sum())
    return outputs, computed
