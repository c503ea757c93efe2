"""Random ternary tensors for tests, and their values."""

import torch

CODES = ("fsv8", "dict16")
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
SHAPES = ((1, 1), (3, 7), (64, 300), (65, 257), (2, 5, 33), (4, 70, 48))
EMPTY = ((0, 5), (5, 0), (0, 0), (0, 4, 4), (2, 0, 3), (2, 3, 0))


def ternary(shape: tuple[int, ...], zeros: float = 0.8, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes with about the given share of zeros, and levels exact in bf16."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    codes *= torch.rand(shape, generator=generator) >= zeros
    levels = torch.rand((*shape[:-1], 2), generator=generator).add(0.1).bfloat16().float()
    return codes.to(torch.int8), levels * torch.tensor([-1.0, 1.0])


def values(codes: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The values of codes and levels."""
    zero = torch.zeros((), dtype=levels.dtype)
    return torch.where(codes < 0, levels[..., :1], torch.where(codes > 0, levels[..., 1:], zero))
