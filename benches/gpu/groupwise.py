"""Cases of group-wise integers, with and without offsets, and with low-rank factors."""

from functools import partial
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray

from benches.gpu.cases import repeated
from moepack import GroupwiseTensor, _core


def make(
    experts: int,
    rows: int,
    columns: int,
    seed: int,
    *,
    bits: int,
    group: int | None,
    symmetric: bool,
    dtype: torch.dtype,
) -> NDArray[np.uint8]:
    """A packed tensor of random weights; above 2^22, 512 rows repeat."""
    large = experts * rows * columns > 1 << 22
    shape = (1, 512, columns) if large else (experts, rows, columns)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * columns**-0.5
    tensor = GroupwiseTensor.quantize(weight, bits, group, symmetric=symmetric, search=False, dtype=dtype)
    data = np.array(tensor.data)
    return repeated(data, experts, rows) if large else data


def _name(bits: int, group: int | None, symmetric: bool) -> str:
    return f"int{bits} {f'group {group}' if group else 'row'} {'symmetric' if symmetric else 'asymmetric'}"


def compensated(
    experts: int, rows: int, columns: int, seed: int, *, rank: int, rank_bits: int, symmetric: bool
) -> NDArray[np.uint8]:
    """3-bit integers in groups of 64 with random factors, of rank 0 for every third expert."""
    base = make(experts, rows, columns, seed, bits=3, group=64, symmetric=symmetric, dtype=torch.float16)
    ranks = np.array([0 if e % 3 == 2 else min(rank, rows, columns) for e in range(experts)], np.int64)
    random = np.random.default_rng(seed)
    sides = []
    for length in (columns, rows):
        shape = (int(ranks.sum()), length)
        if rank_bits == 16:
            sides.append((random.standard_normal(shape) * columns**-0.5).astype(np.float16).astype(np.float32))
            continue
        scales = random.random((shape[0], -(-length // 64))) * 2.0 ** (1 - rank_bits) * columns**-0.5
        codes = random.integers(0, 1 << rank_bits, shape, dtype=np.uint8)
        sides.append((codes, scales.astype(np.float16).astype(np.float32)))
    return _core.encode_compensated(base, ranks, sides[0], sides[1], bits=rank_bits)


SPECIFICATIONS = {
    _name(bits, group, symmetric): partial(
        make, bits=bits, group=group, symmetric=symmetric, dtype=torch.float16 if bits % 2 else torch.bfloat16
    )
    for bits, group, symmetric in product((2, 3, 4, 8), (16, 32, 64, 128, 256, None), (True, False))
} | {
    f"int3 compensated by {bits} bits {'symmetric' if symmetric else 'asymmetric'}": partial(
        compensated, rank=16, rank_bits=bits, symmetric=symmetric
    )
    for bits, symmetric in product((3, 8, 16), (True, False))
}
