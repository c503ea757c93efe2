"""Experts that stay on disk: a model runs in a number of bytes that the user names.

`stream` lets a model's store keep what every token needs in memory and read the rest as routers ask for it, past the
system's page cache and into memory that it counts: whole experts (`StreamingStore`), or single channels where experts
are kept so (`ChannelStore`). `Region` is the address range of a tensor, `Source` reads a file, `Residency` decides
which experts stay and `Blocks` which channels.
"""

from typing import Any

from moepack.runtime.streaming.channels import ChannelStore
from moepack.runtime.streaming.residency import Statistics
from moepack.runtime.streaming.store import StreamingStore, statistics_of

__all__ = ["ChannelStore", "Statistics", "StreamingStore", "statistics_of", "stream"]


def stream(model: Any, memory: int) -> None:
    """Keep the weights of a packed model whose bytes are mapped within a number of bytes.

    Args:
        model: as `moepack.load` gives it, on the CPU.
        memory: the most bytes that weights may take.

    Raises:
        CorruptionError, LoadError: as `StreamingStore.take`.
    """
    by_channels = ChannelStore.suits(model, memory)
    (ChannelStore if by_channels else StreamingStore)(memory).take(model)
