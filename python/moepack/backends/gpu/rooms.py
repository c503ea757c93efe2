"""Keys and values of sequences that have buffers of their own, for launches over tokens of several sequences
(`cuda/common/rooms.cuh`).

Launches read addresses, sizes and places from tensors, so that one recording of them serves any sequences.
"""

from typing import NamedTuple

from torch import Tensor

from moepack.backends.gpu.structs import Struct, StructValue

__all__ = ["NO_ROOMS", "ROOMS", "Rooms"]

ROOMS = Struct("common/rooms.cuh", "Rooms")


class Rooms(NamedTuple):
    """The buffers of a layer, and the tokens of a launch; tensors are int64 on a GPU.

    Attributes:
        keys, values: [S], the addresses of the sequences' buffers [groups, capacity, width].
        capacity: [S].
        sequence, place: [R], the sequence of each row, and its token in the buffers; -1 for rows without a token.
        narrow: whether tokens are in 8 bits (`moepack.decoding.narrow`). Capacities are multiples of 4 then.
        window: tokens that a token attends to, including itself; 0 for all.
    """

    keys: Tensor
    values: Tensor
    capacity: Tensor
    sequence: Tensor
    place: Tensor
    narrow: bool = False
    window: int = 0

    def struct(self) -> StructValue:
        """The kernels' structure."""
        return ROOMS(**self._asdict())


NO_ROOMS = dict.fromkeys(Rooms._fields)
"""The members of a structure for launches without such buffers."""
