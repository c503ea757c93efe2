"""What `compress` did, in numbers."""

from dataclasses import dataclass
from pathlib import Path

from moepack.format.manifest import Manifest


@dataclass(frozen=True)
class CompressReport:
    """The outcome of `compress`.

    Attributes:
        path: the packed directory.
        method: name of the method.
        source_bytes: bytes of the checkpoint's tensors and the small files that were copied.
        packed_bytes: bytes of the packed directory, everything counted.
        expert_source_bytes: bytes of the compressed weights in the checkpoint.
        expert_bytes: bytes of the same weights packed, with all their metadata.
        expert_weights: how many weights were compressed.
        bits_per_weight: packed bits of a compressed weight, all metadata counted.
        seconds: wall time of this run.
        weights_per_second: weights that this run compressed (not those of an interrupted one), a second.
        peak_memory: most anonymous memory seen in this run, in bytes.
        resumed_weights: weights that an interrupted run had done before.
        skipped: entries of the source directory that were not taken over.
        notes: what the reader of the checkpoint wants the user to know, in full sentences.
    """

    path: Path
    method: str
    source_bytes: int
    packed_bytes: int
    expert_source_bytes: int
    expert_bytes: int
    expert_weights: int
    bits_per_weight: float
    seconds: float
    weights_per_second: float
    peak_memory: int
    resumed_weights: int
    skipped: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Totals:
    """Sums over the packed tensors of a directory: weights, bytes before and after."""

    weights: int
    source_bytes: int
    packed_bytes: int

    @classmethod
    def of(cls, manifest: Manifest) -> "Totals":
        """Add up a manifest."""
        records = manifest.packed().values()
        weights = sum(record.shape[0] * record.shape[1] * record.shape[2] for record in records)
        return cls(weights, sum(record.source_bytes for record in records), sum(record.nbytes for record in records))

    @property
    def bits_per_weight(self) -> float:
        """Packed bits a weight."""
        return 8 * self.packed_bytes / max(self.weights, 1)


def directory_bytes(manifest: Manifest) -> int:
    """Return the size of the whole directory, the manifest included."""
    return sum(record.size for record in manifest.files.values()) + len(manifest.to_bytes())
