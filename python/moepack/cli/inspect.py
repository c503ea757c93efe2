"""`moepack inspect`: what a packed directory holds, by layer and projection or by matrix. Reads metadata only."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from moepack.units import size

if TYPE_CHECKING:
    from moepack.format import Manifest, TensorRecord

WIDTH = 132
"""Columns of text that the table takes at least."""

_ORDER = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class MatrixRow:
    """What a method noted of one matrix of a tensor, None where it did not: the rank of its compensator, the excess
    kurtosis of its weights, the rank of the residual (values below half of the largest), and the relative error."""

    rank: int | None
    kurtosis: float | None
    residual_rank: int | None
    error: float | None


@dataclass(frozen=True)
class Row:
    """A packed tensor as it is shown.

    Sizes in bytes; `zeros` is the share of weights that are zero, or None; `role` is "experts" or what a linear layer
    outside the experts is; `error` is the squared error relative to the weights' energy, or None; `matrices` is empty
    unless the method noted something of each matrix.
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


def inspect_command(
    directory: Annotated[Path, typer.Argument(help="A packed directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    matrices: Annotated[
        bool, typer.Option("--matrices", help="Show each matrix: rank, kurtosis, rank of the residual, error.")
    ] = False,
) -> None:
    """Show each layer and projection of DIRECTORY: format, bits a weight, share of zeros, size before and after."""
    print_directory(directory, as_json, matrices)


def print_directory(directory: Path, as_json: bool = False, matrices: bool = False) -> None:
    """Print what `inspect` shows of a packed directory."""
    from moepack.format import PackedDirectory

    manifest = PackedDirectory.open(directory).manifest
    rows = [_row(record) for record in sorted(manifest.packed().values(), key=_place)]
    totals = _totals(manifest, rows)
    if as_json:
        settings = {"version": manifest.version, "method": manifest.method, "settings": dict(manifest.settings)}
        about = {"architecture": manifest.architecture, **settings}
        print(json.dumps({**about, "tensors": [asdict(row) for row in rows], "totals": totals}, indent=2))
        return
    _print(manifest, rows, totals)
    if matrices:
        _print_matrices(rows)


def _place(record: "TensorRecord") -> tuple[str, int]:
    """Sort key: layer by layer as stored, projections in the order of the computation."""
    name = record.projection
    return record.file, _ORDER.index(name) if name in _ORDER else len(_ORDER)


def _row(record: "TensorRecord") -> Row:
    weights = math.prod(record.shape)
    nonzeros, error = record.details.get("nonzeros"), record.details.get("relative_error")
    zeros = None if nonzeros is None or not weights else 1 - nonzeros / weights
    name = _format(record)
    bits = 8 * record.nbytes / max(weights, 1)
    layer, projection, role = record.module, record.projection, "experts"
    if not record.experts:
        layer, _, projection = record.module.rpartition(".")
        role = str(record.details.get("role", "dense"))
    sizes = record.source_bytes, record.nbytes
    return Row(layer, projection, role, name, record.shape, bits, zeros, error, *sizes, tuple(_matrices(record)))


def _matrices(record: "TensorRecord") -> Iterator[MatrixRow]:
    """What the details say of each matrix."""
    names = ("ranks", "kurtosis", "residual_ranks", "errors")
    count = record.shape[0] if record.experts else 1
    found = [record.details.get(name) for name in names]
    lists = [values if isinstance(values, list) and len(values) == count else [None] * count for values in found]
    if any(values is not None for values in found):
        yield from (MatrixRow(*values) for values in zip(*lists, strict=True))


def _format(record: "TensorRecord") -> str:
    """The kind with what it is worth to know of it: `ternary fsv8`, `int4 group 64`, `int3 group 64 + rank 8-16`."""
    details = record.details
    if record.kind in ("groupwise", "coded-groupwise", "compensated") and {"bits", "group_size"} <= set(details):
        width = details["group_size"]
        name = f"int{details['bits']} " + ("row" if width == record.shape[-1] else f"group {width}")
        if record.kind == "coded-groupwise":
            return f"{name} coded"
        ranks = sorted({*details.get("ranks", ())})
        span = "-".join(str(rank) for rank in dict.fromkeys((*ranks[:1], *ranks[-1:])))
        return f"{name} + rank {span}" if any(ranks) else name
    if record.kind == "codebook" and {"bits", "block_size"} <= set(details):
        width, activations = details["block_size"], details.get("activation_bits")
        place = "row" if width >= record.shape[-1] else f"block {width}"
        return f"codebook{details['bits']} {place}" + (f" A{activations}" if activations else "")
    return record.kind if "code" not in details else f"{record.kind} {details['code']}"


def _totals(manifest: "Manifest", rows: list[Row]) -> dict[str, Any]:
    """Add up: experts, packed linear layers, dense tensors (the same before and after), files, the whole directory."""
    dense = sum(record.nbytes for record in manifest.tensors.values() if not record.packed)
    directory = sum(record.size for record in manifest.files.values()) + len(manifest.to_bytes())
    before, after = sum(row.before for row in rows), sum(row.after for row in rows)
    other = directory - after - dense
    experts, linears = _sum(rows, experts=True), _sum(rows, experts=False)
    return {
        "weights": experts.pop("weights"),
        "experts": experts,
        "linears": linears,
        "dense": dense,
        "other_files": other,
        "directory": {"before": before + dense + other, "after": directory},
    }


def _sum(rows: list[Row], experts: bool) -> dict[str, Any]:
    """Add up the rows of the experts, or the others."""
    chosen = [row for row in rows if (row.role == "experts") == experts]
    weights = sum(math.prod(row.shape) for row in chosen)
    before, after = sum(row.before for row in chosen), sum(row.after for row in chosen)
    return {"weights": weights, "before": before, "after": after, "bits_per_weight": 8 * after / max(weights, 1)}


def _print(manifest: "Manifest", rows: list[Row], totals: Mapping[str, Any]) -> None:
    settings = ", ".join(f"{key} {value}" for key, value in manifest.settings.items() if value not in ("", None))
    table = Table(
        title=f"{manifest.architecture}: {manifest.method} ({settings}), format {manifest.version}",
        title_justify="left",
        box=box.SIMPLE,
        pad_edge=False,
    )
    table.add_column("layer / projection", no_wrap=True)
    table.add_column("format", no_wrap=True)
    for name in ("shape", "bits/weight", "zeros/error", "before", "after", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    layer = None
    for row in rows:
        if row.layer != layer:
            table.add_row(row.layer)
            layer = row.layer
        table.add_row(*_cells(row))
    table.add_section()
    experts, dense = totals["experts"], {"before": totals["dense"], "after": totals["dense"]}
    bits = f"{experts['bits_per_weight']:.3f}"
    table.add_row("all experts", "", f"{totals['weights']:,}", bits, *_sizes(experts))
    if linears := totals["linears"]["weights"]:
        packed = totals["linears"]
        table.add_row("packed linear layers", "", f"{linears:,}", f"{packed['bits_per_weight']:.3f}", *_sizes(packed))
    table.add_row("dense tensors", "", "", "", *_sizes(dense))
    table.add_row("directory", "", "", "", *_sizes(totals["directory"]))
    # A table squeezed below this width cannot be read; a log has no width of its own.
    Console(width=max(Console().width, WIDTH)).print(table)


def _print_matrices(rows: list[Row]) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("matrix", no_wrap=True)
    for name in ("rank", "kurtosis", "residual rank", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        for number, matrix in enumerate(row.matrices):
            name = f"{row.layer}.{row.projection}" + (f" {number}" if row.role == "experts" else "")
            table.add_row(name, *("" if value is None else f"{value:.4g}" for value in asdict(matrix).values()))
    Console(width=max(Console().width, WIDTH)).print(table)


def _cells(row: Row) -> tuple[str, ...]:
    zeros = "" if row.zeros is None else f"{row.zeros:.1%}"
    if row.error is not None:
        zeros = f"{row.error:.2e}"
    shape = " x ".join(map(str, row.shape))
    sizes = (size(row.before), size(row.after), _ratio(row.before, row.after))
    return f"  {row.projection}", row.format, shape, f"{row.bits_per_weight:.3f}", zeros, *sizes


def _sizes(pair: Mapping[str, int]) -> tuple[str, str, str, str]:
    return "", size(pair["before"]), size(pair["after"]), _ratio(pair["before"], pair["after"])


def _ratio(before: int, after: int) -> str:
    return f"{before / after:.2f}x" if after else ""
