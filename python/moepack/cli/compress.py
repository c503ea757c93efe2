"""`moepack compress`: make a packed directory from a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moepack.cli import options, settings
from moepack.cli.inspect import print_directory
from moepack.cli.usage import wrong_usage
from moepack.units import size, speed

if TYPE_CHECKING:
    from moepack.pipeline import CompressReport


_OWN = {"model", "out", "method", "report", "threads", "resume", "quiet"}
"""Options that are no settings of a method."""


def compress_command(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="Directory of a Hugging Face checkpoint (safetensors).")],
    out: Annotated[Path, typer.Argument(help="Directory to be made; it must not exist.")],
    method: Annotated[
        str, typer.Option(help="Compression method: ternary, qmoe, finequant, codequant or milo.")
    ] = "ternary",
    code: settings.Code = None,
    calibration: settings.Calibration = None,
    samples: settings.Samples = None,
    sequence_length: settings.SequenceLength = None,
    bits: settings.Bits = None,
    bits_per_weight: settings.BitsPerWeight = None,
    group_size: settings.GroupSize = None,
    dense_bits: settings.DenseBits = None,
    weight_bits: settings.WeightBits = None,
    activation_bits: settings.ActivationBits = None,
    block: settings.Block = None,
    steps: settings.Steps = None,
    alpha: settings.Alpha = None,
    symmetric: settings.Symmetric = None,
    search: settings.Search = None,
    scales: settings.Scales = None,
    rotation: settings.Rotation = None,
    hadamard: settings.Hadamard = None,
    solver: settings.Solver = None,
    rank: settings.Rank = None,
    rank_bits: settings.RankBits = None,
    refine: settings.Refine = None,
    memory_budget: settings.MemoryBudget = None,
    device: settings.Device = None,
    report: Annotated[bool, typer.Option("--report", help="List what was chosen for every tensor.")] = False,
    threads: options.Threads = None,
    resume: options.Resume = True,
    quiet: options.Quiet = False,
) -> None:
    """Compress the experts of MODEL into the packed directory OUT.

    An interrupted run leaves OUT.partial; the same command continues it.
    """
    from moepack.methods import create
    from moepack.pipeline import compress
    from moepack.progress import terminal_progress

    console = Console(stderr=True)
    given = {name: value for name, value in context.params.items() if name not in _OWN and value is not None}
    with wrong_usage():
        chosen = create(method, **given)
        try:
            progress = terminal_progress(console, quiet)
            done = compress(model, out, method=chosen, threads=threads, resume=resume, progress=progress)
        except KeyboardInterrupt:
            raise interrupted(console, out) from None
    print_report(done)
    if report:
        print_directory(out)


def interrupted(console: Console, out: Path) -> typer.Exit:
    """Say how to go on after Ctrl-C; return the exit to raise."""
    from moepack.pipeline import PARTIAL
    from moepack.pipeline.rewrite import STATE

    kept = [file for suffix in (PARTIAL, STATE) if (file := out.with_name(out.name + suffix)).exists()]
    rest = f"the same command continues from {kept[0]}" if kept else "nothing was written yet"
    console.print(f"interrupted; {rest}", markup=False, soft_wrap=True)
    return typer.Exit(130)


def print_report(report: "CompressReport") -> None:
    """Print what was written, in sizes and times."""
    for note in report.notes:
        print(f"note: {note}")
    if report.skipped:
        print(f"not taken over: {', '.join(report.skipped)}")
    experts = f"{size(report.expert_source_bytes)} -> {size(report.expert_bytes)}"
    print(f"experts    {experts} ({report.bits_per_weight:.3f} bits a weight)")
    if report.dense_weights:
        bits = 8 * report.dense_bytes / report.dense_weights
        print(f"dense      {size(report.dense_source_bytes)} -> {size(report.dense_bytes)} ({bits:.3f} bits a weight)")
    ratio = report.source_bytes / max(report.packed_bytes, 1)
    print(f"directory  {size(report.source_bytes)} -> {size(report.packed_bytes)} ({ratio:.2f}x)")
    rate = speed(report.weights_per_second)
    print(f"time       {report.seconds:.1f} s ({rate}), peak memory {size(report.peak_memory)}")
    print(f"wrote      {report.path}")
