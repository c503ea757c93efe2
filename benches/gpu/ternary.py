"""Cases of ternary weights, with both codes."""

from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from moepack import encode_ternary

ZEROS = 0.885
"""The share of zeros for which the code of the QMoE paper is designed."""


def make(
    experts: int, rows: int, columns: int, seed: int, *, code: str, zeros: float = ZEROS, spread: float = 0.0
) -> NDArray[np.uint8]:
    """A packed tensor of random codes; more than 2^24 are the same rows over and over.

    Args:
        experts: of the tensor.
        rows: of an expert.
        columns: of a row.
        seed: of the codes.
        code: "fsv8" or "dict16".
        zeros: their mean share.
        spread: the standard deviation of that share among rows.
    """
    generator = torch.Generator().manual_seed(seed)
    count = min(experts * rows, max(64, (1 << 24) // columns))
    share = (zeros + spread * torch.randn(count, 1, generator=generator)).clamp(0, 1)
    drawn = torch.rand(count, columns, generator=generator)
    codes = (drawn > share).to(torch.int8) - 2 * (drawn > (1 + share) / 2).to(torch.int8)
    levels = (torch.rand(count, 2, generator=generator) + 0.5) * torch.tensor([-1.0, 1.0]) * (9 / columns) ** 0.5
    places = torch.arange(experts * rows) % count
    shape = (experts, rows, columns)
    return np.array(
        encode_ternary(
            codes[places].view(shape), levels=levels[places].bfloat16().view(experts, rows, 2), code=code
        ).data
    )


SPECIFICATIONS = {
    "fsv8": partial(make, code="fsv8"),
    "fsv8 uneven": partial(make, code="fsv8", spread=0.03),
    "fsv8 dense": partial(make, code="fsv8", zeros=0.6, spread=0.1),
    "dict16": partial(make, code="dict16"),
}
