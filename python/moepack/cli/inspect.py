"""`moepack inspect`: the contents of a packed directory by layer, projection and matrix. Reads metadata only."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.table import Table

from moepack.cli.console import plain_console
from moepack.memory import importing
from moepack.units import size

if TYPE_CHECKING:
    from moepack.format import Manifest
    from moepack.report.contents import Row

WIDTH = 132
"""Minimum width of the tables, in characters."""


def inspect_command(
    directory: Annotated[Path, typer.Argument(help="A packed directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    matrices: Annotated[
        bool, typer.Option("--matrices", help="Also show each matrix: rank, kurtosis, error, threshold, sparsity.")
    ] = False,
) -> None:
    """Show format, bits per weight, fraction of zeros, and size before and after, of all layers of DIRECTORY."""
    print_directory(directory, as_json, matrices)


def print_directory(directory: Path, as_json: bool = False, matrices: bool = False) -> None:
    """Print the output of `moepack inspect`."""
    with importing():
        from moepack.format import PackedDirectory
        from moepack.report.contents import add_up, read_rows

    manifest = PackedDirectory.open(directory).manifest
    rows = read_rows(manifest)
    totals = add_up(manifest, rows)
    if as_json:
        settings = {"version": manifest.version, "method": manifest.method, "settings": dict(manifest.settings)}
        about = {"architecture": manifest.architecture, **settings}
        print(json.dumps({**about, "tensors": [asdict(row) for row in rows], "totals": totals}, indent=2))
        return
    _print(manifest, rows, totals)
    if matrices:
        _print_matrices(rows)


def _print(manifest: "Manifest", rows: "list[Row]", totals: Mapping[str, Any]) -> None:
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
    # A narrower table is unreadable, and a log has no width.
    plain_console(width=max(plain_console().width, WIDTH)).print(table)


def _print_matrices(rows: "list[Row]") -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("matrix", no_wrap=True)
    for name in ("rank", "kurtosis", "residual rank", "error", "threshold", "predicted", "achieved"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        for number, matrix in enumerate(row.matrices):
            name = f"{row.layer}.{row.projection}" + (f" {number}" if row.role == "experts" else "")
            table.add_row(name, *("" if value is None else f"{value:.4g}" for value in asdict(matrix).values()))
    plain_console(width=max(plain_console().width, WIDTH)).print(table)


def _cells(row: "Row") -> tuple[str, ...]:
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
