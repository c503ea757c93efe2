"""The shards of a model on the Hub as other processes read them: from the Hub's cache of their machine, or by ranges.

`RemoteFiles` becomes this when it is sent to another process. The token, the endpoint and the cache are those of the
process that reads, so no token travels.

Invariant: bytes are those of the listed commit, as far as `transfer` can verify a range.
"""

from collections.abc import Mapping

import numpy as np

from moepack.checkpoint.remote.transfer import Listing, Transfer
from moepack.checkpoint.shards import Bytes, ShardFiles, map_range
from moepack.format.header import Header, TensorInfo

__all__ = ["RangeFiles"]


class RangeFiles(ShardFiles):
    """The shards of one commit, of which nothing is kept."""

    is_local = False

    def __init__(self, shards: Mapping[str, Header], listing: Listing) -> None:
        super().__init__(shards)
        self._listing = listing
        self._transfer: Transfer | None = None

    def __reduce__(self) -> tuple[type["RangeFiles"], tuple[Mapping[str, Header], Listing]]:
        return RangeFiles, (self.shards, self._listing)

    def raw(self, info: TensorInfo) -> Bytes:
        """See `ShardFiles`.

        Raises:
            DownloadError: the bytes cannot be downloaded.
        """
        name = info.file.name
        if (found := self._listing.cached(name)) is not None:
            return map_range(found, info, None)
        self._transfer = self._transfer or Transfer(self._listing)
        return np.frombuffer(self._transfer.filled(name, info.offset, info.offset + info.nbytes), np.uint8)
