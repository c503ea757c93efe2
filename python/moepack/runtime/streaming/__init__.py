"""Experts that stay on disk: a model runs in a number of bytes that the user names.

`StreamingStore` keeps what every token needs in memory and reads experts as routers ask for them, past the system's
page cache and into memory that it counts. `Region` is the address range of a tensor, `Source` reads a file,
`Residency` decides what stays.
"""

from moepack.runtime.streaming.residency import Statistics
from moepack.runtime.streaming.store import StreamingStore, statistics_of

__all__ = ["Statistics", "StreamingStore", "statistics_of"]
