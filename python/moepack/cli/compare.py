"""`moepack compare`: compare the loss of methods over size on the user's own model."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moepack.cli.console import plain_console
from moepack.cli.placement import usable_device
from moepack.cli.usage import require_place, wrong_usage
from moepack.memory import importing
from moepack.system.interrupts import interrupt_on_termination
from moepack.units import byte_count, size

__all__ = ["compare_command"]


def compare_command(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or Hub model.")],
    text: Annotated[list[Path], typer.Option(help="Evaluation text file; may be repeated.", exists=True)],
    sizes: Annotated[
        str,
        typer.Option(help="Sizes separated by commas, each in bytes (such as 3MB) or in percent of the checkpoint."),
    ] = "12%,20%,30%",
    methods: Annotated[str, typer.Option(help="Methods separated by commas.")] = "auto,rate,finequant,milo",
    calibration: Annotated[
        str | None, typer.Option(help="Calibration text, or `none`. Default: that of each method.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Number of calibration windows.", min=1)] = 128,
    chars: Annotated[int, typer.Option(help="Characters of each text to use.", min=1)] = 100_000,
    device: Annotated[str, typer.Option(help="cpu or cuda.", callback=usable_device)] = "cpu",
    chart: Annotated[Path | None, typer.Option(help="Write a chart to this SVG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per packed model.")] = False,
) -> None:
    """Compress MODEL with several methods to several sizes, and show the loss increase of each on a text.

    The packed models are deleted afterwards.
    """
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.comparison import Comparison, draw, fittings

    quiet_transformers()
    interrupt_on_termination()  # packed models are in temporary directories
    with wrong_usage():
        require_place(chart)
        names = [name.strip() for name in methods.split(",")]
        if unknown := sorted(set(names) - set(known := fittings())):
            raise ValueError(f"cannot compare {', '.join(unknown)}; choose from {', '.join(known)}")
        compared = Comparison(model, text, chars, device)
        wanted = [_bytes(part.strip(), compared.size) for part in sizes.split(",")]
        source = {} if calibration is None else {"calibration": calibration, "samples": samples, "device": device}
        points = []
        for point in compared.points(wanted, names, source):
            points.append(point)
            if as_json:
                print(json.dumps(point.to_json()), flush=True)
        if not points:
            raise ValueError("no method meets any of the sizes")
    if not as_json:
        table = Table("method", "size", "of the original", *(file.stem for file in text), box=None)
        for point in points:
            rises = (f"{rise:+.4f}" for rise in point.rise.values())
            table.add_row(point.method, size(point.size), f"{point.size / compared.size:.1%}", *rises)
        plain_console().print(table)
    if chart is not None:
        first = text[0].stem
        lines = {name: [(p.size / 1e6, p.rise[first]) for p in points if p.method == name] for name in names}
        title = f"{compared.path.name}: loss over bf16 on {first}, nats per token"
        chart.write_text(draw(title, "MB", lines), encoding="utf-8", newline="\n")


def _bytes(text: str, original: int) -> int:
    """Parse a size, or a percentage of the original size, into bytes."""
    return int(original * float(text.removesuffix("%")) / 100) if text.endswith("%") else byte_count(text)
