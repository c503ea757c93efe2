"""Cases of group-wise integers, with and without offsets, and with low-rank factors."""

from functools import partial
from itertools import product

import numpy as np
import torch
from cases import repeated
from numpy.typing import NDArray

from moepack import GroupwiseTensor


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
    """A packed tensor of random weights; more than 2^22 are the same 512 rows over and over."""
    large = experts * rows * columns > 1 << 22
    shape = (1, 512, columns) if large else (experts, rows, columns)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * columns**-0.5
    tensor = GroupwiseTensor.quantize(weight, bits, group, symmetric=symmetric, search=False, dtype=dtype)
    data = np.array(tensor.data)
    return repeated(data, experts, rows) if large else data


def _name(bits: int, group: int | None, symmetric: bool) -> str:
    return f"int{bits} {f'group {group}' if group else 'row'} {'symmetric' if symmetric else 'asymmetric'}"


SPECIFICATIONS = {
    _name(bits, group, symmetric): partial(
        make, bits=bits, group=group, symmetric=symmetric, dtype=torch.float16 if bits % 2 else torch.bfloat16
    )
    for bits, group, symmetric in product((2, 3, 4, 8), (16, 32, 64, 128, 256, None), (True, False))
}
