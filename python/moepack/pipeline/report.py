"""The report of `compress`: sizes, time and memory."""

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
        source_bytes: bytes of the checkpoint's tensors and the copied small files.
        packed_bytes: size of the packed directory in bytes.
        expert_source_bytes: bytes of the compressed expert weights in the checkpoint.
        expert_bytes: bytes of the same weights packed, including all metadata.
        expert_weights: number of compressed expert weights.
        bits_per_weight: packed bits per expert weight, including all metadata.
        dense_source_bytes, dense_bytes, dense_weights: the same for packed linear layers outside the experts.
        seconds: wall time of this run.
        weights_per_second: weights compressed per second in this run, without those of an interrupted run.
        peak_memory: peak anonymous memory of this run in bytes.
        resumed_weights: weights that an interrupted run had already compressed.
        skipped: entries of the source directory that were not copied.
        notes: notes for the user, as complete sentences.
        increase: loss increase over the original in nats per token, on a part of the calibration text; None if not
            measured.
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
    """Totals over packed tensors: weights, and bytes before and after."""

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
        """Packed bits per weight."""
        return 8 * self.packed_bytes / max(self.weights, 1)


@dataclass(frozen=True)
class Totals:
    """Totals of a directory: packed experts, and packed linear layers outside them."""

    experts: Sizes
    dense: Sizes

    @classmethod
    def of(cls, manifest: Manifest) -> "Totals":
        """Add up the records of a manifest."""
        records = manifest.packed().values()
        return cls(
            Sizes.of(record for record in records if record.experts),
            Sizes.of(record for record in records if not record.experts),
        )


def directory_bytes(manifest: Manifest) -> int:
    """Return the size of the directory in bytes, including the manifest."""
    return sum(record.size for record in manifest.files.values()) + len(manifest.to_bytes())
