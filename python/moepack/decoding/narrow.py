"""A key-value cache in 8 bits: a little over half of the memory of bfloat16, and of what attention reads.

A row (a token's key or value of one head) is stored as int8 codes and the float32 scale by which they are multiplied,
the largest magnitude of the row over 127. The core reads rows in this form. Transformers' attention gets decoded
tensors, in the dtype of the new keys.

Invariants:

* `keys` and `values` of a layer are encoded, `[batch, heads, tokens, width + 4]`, int8, so the operations inherited
  from transformers (cropping, reordering, copies) act on whole rows;
* a value is off by at most 1/254 of the largest magnitude of its row if that is at least 1e-36; a row with a value that
  is not finite decodes to NaN;
* the core writes the same bytes for the same float32 row.
"""

from typing import Any

import torch
from torch import Tensor

from moepack.decoding.cache import Form, GrowingLayer, GrowingWindow

__all__ = ["NarrowLayer", "NarrowWindow", "decode", "encode", "is_narrow"]

SCALE = 4
"""Bytes of a row's scale."""


def encode(values: Tensor) -> Tensor:
    """Encode rows `[..., width]`; return int8 `[..., width + 4]`."""
    wide = values.float()
    scale = wide.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    # A scale that is not a normal number is rounded by up to a half, so that quotients may exceed 127.
    codes = torch.where(scale > 0, (wide / scale).round().clamp_(-127, 127), 0).to(torch.int8)
    return torch.cat([codes, scale.contiguous().view(torch.int8)], dim=-1)


def decode(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode int8 rows `[..., width + 4]` to `[..., width]` of a dtype."""
    # A copy, because the scale of a single row is contiguous but not aligned.
    scale = rows[..., -SCALE:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return (rows[..., :-SCALE].float() * scale).to(dtype)


def is_narrow(cache: Any) -> bool:
    """Whether any layer of a cache keeps tokens in 8 bits."""
    return any(isinstance(layer, _Narrow) for layer in cache.layers)


class _Narrow:
    """The encoding, in front of a layer that grows in place."""

    @classmethod
    def stored(cls, form: Form) -> Form:
        """The form of the encoded tensors."""
        first, second = form.widths
        return form._replace(widths=(first + SCALE, second + SCALE), dtype=torch.int8)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append tokens, `[batch, heads, tokens, width]`; return all keys and values, decoded."""
        above: Any = super()
        keys, values = above.update(encode(key_states), encode(value_states), *args, **kwargs)
        return decode(keys, key_states.dtype), decode(values, value_states.dtype)


class NarrowLayer(_Narrow, GrowingLayer):
    """A layer that keeps all tokens in 8 bits."""


class NarrowWindow(_Narrow, GrowingWindow):
    """A layer that keeps the tokens of a sliding window in 8 bits."""
