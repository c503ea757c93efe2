"""Lists the contents of a packed directory by tensor and role, for `inspect` and `report`. Reads only the manifest."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moepack.format import Manifest, TensorRecord
from moepack.format.hub import BALANCE, INDEX, PREDICTORS
from moepack.format.manifest import RESIDUALS

__all__ = ["EXPERTS", "ORDER", "MatrixRow", "RoleSize", "Row", "add_up", "read_rows", "role_sizes"]

EXPERTS = "experts"

ORDER = ("gate_proj", "up_proj", "channels", "down_proj", RESIDUALS)
"""Projections of experts in the order of computation."""


@dataclass(frozen=True)
class MatrixRow:
    """What a method recorded about one matrix, None for missing values.

    Attributes:
        rank: rank of the compensator.
        kurtosis: excess kurtosis of the weights.
        residual_rank: rank of the residual (number of singular values below half of the largest).
        error: relative error.
        threshold: for experts stored by channels, the threshold.
        predicted, achieved: fractions of channels that it skips on the calibration text and on a held-out text.
    """

    rank: int | None
    kurtosis: float | None
    residual_rank: int | None
    error: float | None
    threshold: float | None = None
    predicted: float | None = None
    achieved: float | None = None


@dataclass(frozen=True)
class Row:
    """A packed tensor for display.

    Sizes are in bytes. `zeros` is the fraction of zero weights, or None. `role` is "experts" or the role of a linear
    layer. `error` is the squared error relative to the weights' energy, or None. `matrices` is empty unless the method
    recorded values per matrix.
    """

    layer: str
    projection: str
    role: str
    format: str
    shape: tuple[int, ...]
    bits_per_weight: float
    zeros: float | None
    error: float | None
    before: int
    after: int
    matrices: tuple[MatrixRow, ...] = ()

    @property
    def weights(self) -> int:
        """Weights that it stands for; none where it refines other tensors."""
        return 0 if self.projection == RESIDUALS else math.prod(self.shape)


@dataclass(frozen=True)
class RoleSize:
    """All tensors of a role: bytes before and after. `weights` and `bits_per_weight` cover only packed weights."""

    role: str
    weights: int
    before: int
    after: int
    bits_per_weight: float | None


def read_rows(manifest: Manifest) -> list[Row]:
    """Return the packed tensors by layer as stored, with projections in the order of computation."""
    return [_row(record) for record in sorted(manifest.packed().values(), key=_place)]


def _place(record: TensorRecord) -> tuple[str, int]:
    """Return a sort key: by layer as stored, then projections in the order of computation."""
    name = record.projection
    return record.file, ORDER.index(name) if name in ORDER else len(ORDER)


def _row(record: TensorRecord) -> Row:
    weights = math.prod(record.shape)
    nonzeros, error = record.details.get("nonzeros"), record.details.get("relative_error")
    zeros = None if nonzeros is None or not weights else 1 - nonzeros / weights
    name = _format(record)
    bits = 8 * record.nbytes / max(weights, 1)
    layer, projection, role = record.module, record.projection, EXPERTS
    if not record.experts:
        layer, _, projection = record.module.rpartition(".")
        role = str(record.details.get("role", "dense"))
    sizes = record.source_bytes, record.nbytes
    return Row(layer, projection, role, name, record.shape, bits, zeros, error, *sizes, tuple(_matrices(record)))


def _matrices(record: TensorRecord) -> Iterator[MatrixRow]:
    """Yield the recorded values of each matrix."""
    sparsity = ("thresholds", "predicted_sparsity", "achieved_sparsity")
    names = ("ranks", "kurtosis", "residual_ranks", "errors", *sparsity)
    count = record.shape[0] if record.experts else 1
    found = [record.details.get(name) for name in names]
    lists = [values if isinstance(values, list) and len(values) == count else [None] * count for values in found]
    if any(values is not None for values in found):
        yield from (MatrixRow(*map(_number, values)) for values in zip(*lists, strict=True))


def _number(value: Any) -> Any:
    """Return a value of the manifest, which stores infinity as a string."""
    return math.inf if value == "infinity" else value


def _format(record: TensorRecord) -> str:
    """Return the format with its main parameters: `ternary fsv8`, `int4 group 64`, `int3 group 64 + rank 8-16`."""
    details = record.details
    if record.kind in ("groupwise", "compensated") and {"bits", "group_size"} <= set(details):
        width = details["group_size"]
        name = f"int{details['bits']} " + ("row" if width == record.shape[-1] else f"group {width}")
        ranks = sorted({*details.get("ranks", ())})
        span = "-".join(str(rank) for rank in dict.fromkeys((*ranks[:1], *ranks[-1:])))
        return f"{name} + rank {span}" if any(ranks) else name
    if record.kind == "codebook" and {"bits", "block_size"} <= set(details):
        width, activations = details["block_size"], details.get("activation_bits")
        place = "row" if width >= record.shape[-1] else f"block {width}"
        return f"codebook{details['bits']} {place}" + (f" A{activations}" if activations else "")
    if record.kind == "channels":
        skipped = [share for share in details.get("achieved_sparsity", ()) if share is not None]
        width = "bf16" if details["bits"] == 16 else f"int{details['bits']}"
        refines = record.projection == RESIDUALS
        fate = "not refined" if refines else "skipped"
        shares = [f", {sum(skipped) / len(skipped):.1%} {fate}"] if any(skipped) else []
        if isinstance(recall := details.get("recall"), dict):
            guessed = {name: recall.get(name) for name in ("experts", "channels")}
            shares += [f", {share:.0%} of {name} predicted" for name, share in guessed.items() if share is not None]
        return "".join((width, " residuals" if refines else " channels", *shares))
    return record.kind if "code" not in details else f"{record.kind} {details['code']}"


def add_up(manifest: Manifest, rows: list[Row]) -> dict[str, Any]:
    """Return totals of experts, packed linear layers, dense tensors (equal before and after), files, and directory."""
    dense = sum(record.nbytes for record in manifest.tensors.values() if not record.packed)
    directory = sum(record.size for record in manifest.files.values()) + len(manifest.to_bytes())
    before, after = sum(row.before for row in rows), sum(row.after for row in rows)
    other = directory - after - dense
    shards = {record.file for record in manifest.tensors.values()}
    copied = sum(
        record.size for name, record in manifest.files.items() if name not in shards | {BALANCE, INDEX, PREDICTORS}
    )
    experts, linears = _sum(rows, experts=True), _sum(rows, experts=False)
    return {
        "weights": experts.pop("weights"),
        "experts": experts,
        "linears": linears,
        "dense": dense,
        "other_files": other,
        "directory": {"before": before + dense + copied, "after": directory},
    }


def _sum(rows: list[Row], experts: bool) -> dict[str, Any]:
    """Return the totals of the experts, or of all other rows."""
    chosen = [row for row in rows if (row.role == EXPERTS) == experts]
    weights = sum(row.weights for row in chosen)
    before, after = sum(row.before for row in chosen), sum(row.after for row in chosen)
    return {"weights": weights, "before": before, "after": after, "bits_per_weight": 8 * after / max(weights, 1)}


_ROLES = {
    "shared experts": r"shared_expert|shared_mlp",
    "routers": r"router|\.gate\.(weight|e_score)|\.mlp\.gate\.",
    "attention": r"attn|attention|\.layer\.0\.|EncDec",
    "embeddings": r"embed|^shared\.|\bwte\b",
    "head": r"lm_head|output_layer",
    "norms": r"norm",
    "feed-forward": r"\.mlp\.|feed_forward|DenseReluDense",
}
"""Roles of unpacked tensors, by regular expressions for their names. The first match counts."""

_PACKED_ROLES = {"shared": "shared experts", "mlp": "feed-forward", "embedding": "embeddings"}
"""Display names of manifest roles that differ."""


def role_sizes(manifest: Manifest) -> list[RoleSize]:
    """Return bytes by role, the largest before compression first. Dense tensors do not change in size."""
    found: dict[str, list[int]] = {}
    for name, record in manifest.tensors.items():
        role = _packed_role(record) if record.packed else _dense_role(name)
        sums = found.setdefault(role, [0, 0, 0, 0])
        before = record.source_bytes if record.packed else record.nbytes
        packed = (record.weights, record.nbytes) if record.packed else (0, 0)
        for i, value in enumerate((packed[0], before, record.nbytes, packed[1])):
            sums[i] += value
    sizes = [
        RoleSize(role, weights, before, after, 8 * packed / weights if weights else None)
        for role, (weights, before, after, packed) in found.items()
    ]
    return sorted(sizes, key=lambda size: -size.before)


def _packed_role(record: TensorRecord) -> str:
    role = EXPERTS if record.experts else str(record.details.get("role", "feed-forward"))
    return _PACKED_ROLES.get(role, role)


def _dense_role(name: str) -> str:
    return next((role for role, pattern in _ROLES.items() if re.search(pattern, name)), "other")
