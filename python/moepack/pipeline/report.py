"""What `compress` did, in numbers."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moepack.format.manifest import Manifest, TensorRecord


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
        expert_weights: how many weights of experts were compressed.
        bits_per_weight: packed bits of an expert weight, all metadata counted.
        dense_source_bytes, dense_bytes, dense_weights: the same of the linear layers outside the experts that were
            packed.
        seconds: wall time of this run.
        weights_per_second: weights that this run compressed (not those of an interrupted one), a second.
        peak_memory: most anonymous memory seen in this run, in bytes.
        resumed_weights: weights that an interrupted run had done before.
        skipped: entries of the source directory that were not taken over.
        notes: what the reader of the checkpoint wants the user to know, in full sentences.
        increase: of the loss over the original, nats a token on a part of the calibration text; None if not measured.
    """

    path: Path
    method: str
    source_bytes: int
    packed_bytes: int
    expert_source_bytes: int
    expert_bytes: int
    expert_weights: int
    bits_per_weight: float
    dense_source_bytes: int
    dense_bytes: int
    dense_weights: int
    seconds: float
    weights_per_second: float
    peak_memory: int
    resumed_weights: int
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    increase: float | None = None


@dataclass(frozen=True)
class Sizes:
    """Sums over packed tensors: weights, bytes before and after."""

    weights: int
    source_bytes: int
    packed_bytes: int

    @classmethod
    def of(cls, records: Iterable[TensorRecord]) -> "Sizes":
        """Add up records of packed tensors."""
        listed = list(records)
        weights = sum(record.weights for record in listed)
        return cls(weights, sum(record.source_bytes for record in listed), sum(record.nbytes for record in listed))

    @property
    def bits_per_weight(self) -> float:
        """Packed bits a weight."""
        return 8 * self.packed_bytes / max(self.weights, 1)


@dataclass(frozen=True)
class Totals:
    """The packed tensors of a directory: experts, and linear layers outside them."""

    experts: Sizes
    dense: Sizes

    @classmethod
    def of(cls, manifest: Manifest) -> "Totals":
        """Add up a manifest."""
        records = manifest.packed().values()
        return cls(
            Sizes.of(record for record in records if record.experts),
            Sizes.of(record for record in records if not record.experts),
        )


def directory_bytes(manifest: Manifest) -> int:
    """Return the size of the whole directory, the manifest included."""
    return sum(record.size for record in manifest.files.values()) + len(manifest.to_bytes())
