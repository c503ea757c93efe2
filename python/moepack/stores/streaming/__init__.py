"""Streaming experts from disk: a model runs within a given number of bytes.

`stream` installs a store that keeps in memory what every token needs. It reads everything else on demand, bypassing the
page cache, into memory that it accounts for: whole experts (`StreamingStore`), or single channels if experts are stored
by channel (`ChannelStore`). `Region` is the address range of a tensor, and `Source` reads a file. `Residency` decides
which experts stay in memory, and `RecordCache` which channels. `prediction` has what reads ahead for the next layer.
"""

from typing import Any

from moepack.stores.streaming.channels import ChannelStore
from moepack.stores.streaming.experts import StreamingStore, statistics_of
from moepack.stores.streaming.residency import Statistics

__all__ = ["ChannelStore", "Statistics", "StreamingStore", "statistics_of", "stream"]


def stream(model: Any, memory: int) -> None:
    """Keep the weights of a mapped packed model within a number of bytes.

    Args:
        model: a model on the CPU from `moepack.load`.
        memory: the most bytes for weights.

    Raises:
        CorruptionError, LoadError: as in `StreamingStore.take`.
    """
    by_channels = ChannelStore.suits(model, memory)
    (ChannelStore if by_channels else StreamingStore)(memory).take(model)
