"""Attention of single tokens by `cuda/attention.cu`: one query per head, grouped heads without copies.

Splits of a sequence are combined in the same launch, with counters that each launch leaves at zero. They belong to an
object, because they must be written before a recording.
"""

from functools import cache

import torch
from torch import Tensor

from moepack.backends.gpu.program import Program
from moepack.backends.gpu.rooms import NO_ROOMS, ROOMS, Rooms
from moepack.backends.gpu.structs import Struct, StructValue

__all__ = ["Attention", "program"]

_ATTENTION = Struct("attention.cu", "Attention", Rooms=ROOMS)
_HEADS, _TILE = 8, 16
"""Heads of a block, and tokens of a warp."""

_BLOCKS = 2
"""Per multiprocessor."""

_SPLITS = 32
"""The most blocks that share a sequence; the last one of them adds the sums of all."""

_ROWS = 16384
"""The most rows of blocks; each has a counter."""

_MOST_TOKENS = 1 << 20
"""Rooms may hold this many tokens; blocks without tokens return at once."""

_DTYPES = {torch.bfloat16: 0, torch.float16: 1}


class Attention:
    """Attention on one device, for launches one after the other.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(_ROWS, dtype=torch.int32, device=device)
        self._blocks = _BLOCKS * torch.cuda.get_device_properties(device).multi_processor_count

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor | None:
        """Attend to all keys and values.

        Args:
            queries: [B, heads, K], bfloat16 or float16.
            keys, values: [B, groups, tokens, K] and [B, groups, tokens, V].
            mask: [B, tokens], added to the scores; the dtype's least value hides a token.
            scale: of the scores.
            sinks: [heads], scores that take part in the sums only.

        Returns:
            [B, heads, V]; None if the kernel does not support the arguments.
        """
        (batch, heads, key_width), (groups, capacity, value_width) = queries.shape, values.shape[1:]
        given = [each for each in (queries, keys, values, mask, sinks) if each is not None]
        if queries.dtype not in _DTYPES or len({(each.dtype, each.device) for each in given}) > 1:
            return None
        if key_width % 32 or value_width % 64 or max(key_width, value_width) > 256 or heads % groups:
            return None
        if keys.shape != (batch, groups, capacity, key_width) or not capacity:
            return None
        if not (mask is None or mask.shape == (batch, capacity)) or not (sinks is None or sinks.shape == (heads,)):
            return None
        if not all(each.is_contiguous() for each in given):
            return None
        return self._launched(queries, (keys, values), mask, scale, sinks)

    def in_rooms(self, queries: Tensor, rooms: Rooms, groups: int, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Attend to a token and the earlier ones of its sequence, as far as the window of `rooms` extends.

        Args:
            queries: [B, heads, K], bfloat16 or float16; K is 64, 128, 192 or 256.
            rooms: keys and values of the same width, in the same dtype or in 8 bits; each row is a token that they
                hold.
            groups: of heads that share keys and values.
            scale: of the scores.
            sinks: [heads], scores that take part in the sums only.

        Returns:
            [B, heads, K].
        """
        found = self._launched(queries, (rooms, groups), None, scale, sinks)
        if found is None:
            raise RuntimeError("too many sequences for attention")
        return found

    def _launched(
        self,
        queries: Tensor,
        held: tuple[Tensor, Tensor] | tuple[Rooms, int],
        mask: Tensor | None,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """Launch with keys and values, or with rooms and groups; None if there are too many sequences."""
        batch, heads, key_width = queries.shape
        members: dict[str, Tensor | int | StructValue | None]
        if isinstance(held[0], Rooms):
            rooms, groups = held
            narrow, capacity, value_width, most = rooms.narrow, 0, key_width, _MOST_TOKENS
            members = {"keys": None, "values": None, "rooms": rooms.struct()}
        else:
            keys, values = held
            (groups, capacity, value_width), narrow, most = values.shape[1:], False, values.shape[2]
            members = {"keys": keys, "values": values, "rooms": ROOMS(**NO_ROOMS)}
        rows = batch * groups * -(-heads // groups // _HEADS)
        if rows > _ROWS:
            return None
        warps = 4 if value_width > 128 else 8
        splits = max(1, min(-(-most // (_TILE * warps)), self._blocks // rows, _SPLITS))
        parts, stats = (
            torch.empty(rows * splits * _HEADS * width, dtype=torch.float32, device=queries.device)
            for width in (value_width, 2)
        )
        out = queries.new_empty((batch, heads, value_width))
        argument = _ATTENTION(
            queries=queries, mask=mask, sinks=sinks, out=out, stats=stats, parts=parts, arrived=self._arrived,
            groups=groups, group=heads // groups, capacity=capacity, scale=scale, **members,
        )  # fmt: skip
        kernels = program(_DTYPES[queries.dtype], narrow, key_width, value_width)
        kernels.launch("attend", (splits, rows), 32 * warps, [argument], early=True)
        return out


@cache
def program(half: int, narrow: bool, key_width: int, value_width: int) -> Program:
    """The kernel for bfloat16 (0) or float16 (1), rooms of 8 bits, and the columns of a head."""
    return Program("attention.cu", HALF=half, NARROW=int(narrow), KEY_WIDTH=key_width, VALUE_WIDTH=value_width)
