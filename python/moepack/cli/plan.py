"""`moepack plan`: compare sizes of a model before it is packed, without a download."""

import json
from dataclasses import asdict
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moepack.cli import options
from moepack.cli.console import plain_console
from moepack.cli.usage import wrong_usage
from moepack.memory import importing
from moepack.units import size

if TYPE_CHECKING:
    from moepack.pipeline.outlook import Choice, Outlook
    from moepack.pipeline.source import Streaming

__all__ = ["download_text", "exact_size", "plan_command", "print_outlook"]

UNKNOWN = "unknown"
NOWHERE = "does not fit"


def plan_command(
    model: options.Checkpoint,
    *,
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            help="Total size of the weight files, for example 9GB; may be repeated. Default: sizes at 2, 3, 4, 5, 6 "
            "and 8 bits per weight.",
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="MACHINE", help="Another machine, for example RAM=32GB,GPU=12GB,NVMe. Default: this one."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option("--target", help="Machine of the speeds: avx2-8core, avx512, h100, or a file of doctor --json."),
    ] = None,
    loss: Annotated[
        bool,
        typer.Option(
            "--loss", help="Predict the loss increase of a local checkpoint. Takes longer, because weights are read."
        ),
    ] = False,
    config: options.Configuration = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show memory, speed and placement (RAM, GPU, both, or experts on the drive) of MODEL at several packed sizes.

    Only headers are read, a few megabytes of a Hub model. --loss predicts the loss increase of a local checkpoint, if
    an earlier `moepack compress` measured the sensitivity of its weights.
    """
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.pipeline.machines import Machine
        from moepack.pipeline.outlook import outlook

    quiet_transformers()
    with wrong_usage():
        given = None if machine is None else Machine.described(machine)
        found = outlook(model, sizes or (), given, loss=loss, target=target, config=config)
    if as_json:
        print(json.dumps(asdict(found), indent=2))
    else:
        print_outlook(found, plain_console())


def print_outlook(found: "Outlook", console: Console) -> None:
    """Print the model, the machine, a table of sizes, and the command for the best one."""
    parts = ", ".join(f"{part.role} {size(part.before)}" for part in found.parts)
    names = " / ".join(each.name for each in found.choices[0].preferences)
    rows = [
        ("model", f"{found.model} ({found.architecture}: {found.layers} layers of {found.experts} experts)"),
        ("weights", f"{found.weights:,} in {size(found.stored)}: {parts}"),
        *([("download", download_text(found.streaming))] if found.streaming is not None else []),
        ("to pack", f"about {size(found.pack_memory)} of memory, on any machine"),
        ("machine", str(found.machine)),
        *([("speeds", f"{found.target}; tokens/s with --prefer {names}")] if names else []),
        *(("note", note) for note in found.notes),
    ]
    for label, text in rows:
        console.print(f"{label:<9} {text}", soft_wrap=True)
    table = [("size", "bits", "expected loss", "to run", "tokens/s", "runs from"), *map(_cells, found.choices)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        console.print(line.rstrip(), soft_wrap=True)
    _print_next(found, console)


def _cells(choice: "Choice") -> tuple[str, ...]:
    loss = UNKNOWN if choice.loss is None else f"+{choice.loss[0]:.2g} to +{choice.loss[1]:.2g}"
    speeds = [f"{each.tokens_per_second:.3g}" for each in choice.preferences]
    speed = " / ".join(speeds) or UNKNOWN
    places = ", ".join(choice.places) or NOWHERE
    return size(choice.nbytes), f"{choice.bits:.2f}", loss, size(choice.run_memory), speed, places


def _print_next(found: "Outlook", console: Console) -> None:
    if any(choice.loss is None for choice in found.choices):
        text = (
            "The loss is unknown. --loss predicts it after a first `moepack compress`; `moepack compare` measures it."
        )
        console.print(text, soft_wrap=True)
    if found.best is None:
        console.print("None of these sizes fits this machine." if found.machine.here else "None of these sizes fits.")
    else:
        command = f"moepack compress {quote(found.model)} OUT --size {exact_size(found.best.nbytes)}"
        console.print(f"next      {command}", soft_wrap=True)


def exact_size(nbytes: int) -> str:
    """Return a size for a command, rounded down."""
    for unit, count in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= count:
            return f"{nbytes * 100 // count / 100:g}{unit}"
    return str(nbytes)


def download_text(found: "Streaming") -> str:
    """Describe how a model on the Hub is downloaded."""
    total = f"{size(found.download)} in {found.shards} shard{'s' * (found.shards != 1)}"
    if found.budget is None:
        return f"{total}, kept in the Hub's cache"
    if found.whole:
        return f"{total}, kept until the job is done, because the method reads it several times"
    return f"{total}, at most {size(found.disk)} of it on disk at a time"
