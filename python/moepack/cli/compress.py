"""`moepack compress`: make a packed directory from a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from moepack.cli.device import usable_device
from moepack.cli.inspect import print_directory
from moepack.errors import MoepackError
from moepack.units import size, speed

if TYPE_CHECKING:
    from moepack.pipeline import CompressReport


def compress_command(
    model: Annotated[Path, typer.Argument(help="Directory of a Hugging Face checkpoint (safetensors).")],
    out: Annotated[Path, typer.Argument(help="Directory to be made; it must not exist.")],
    method: Annotated[
        str, typer.Option(help="Compression method: ternary, qmoe, finequant, codequant or milo.")
    ] = "ternary",
    code: Annotated[str | None, typer.Option(help="ternary, qmoe: fsv8 or dict16; default fsv8.")] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="qmoe, codequant, milo: text file, JSON lines, directory, or data set of the hub."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="qmoe, codequant, milo: calibration samples; default 128.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="qmoe, codequant, milo: tokens a sample; default 512.")
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option(help="qmoe: ternary or 2, default ternary. finequant, milo: 2, 3, 4 or 8, default 4, 3."),
    ] = None,
    bits_per_weight: Annotated[
        float | None,
        typer.Option(help="qmoe: rate of the coded experts, 0.6 to 1.6. finequant: budget of --group-size budget."),
    ] = None,
    group_size: Annotated[
        str | None,
        typer.Option(help="finequant: 16 to 256, row, adaptive[-mean] or budget; default 64. qmoe, milo: 16 to 256."),
    ] = None,
    dense_bits: Annotated[
        str | None,
        typer.Option(
            help="finequant, qmoe: bits of attention, shared experts and dense layers: 8, or attention=4,shared=8."
        ),
    ] = None,
    weight_bits: Annotated[int | None, typer.Option(help="codequant: 2, 3 or 4 bits of a code; default 4.")] = None,
    activation_bits: Annotated[
        int | None,
        typer.Option(help="codequant: round what packed layers read to 8 or 4 bits; default 16, not at all."),
    ] = None,
    block: Annotated[
        str | None, typer.Option(help="codequant: columns that share a codebook, or row; default row.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=0, help="codequant: refinements of codes and centroids.")] = None,
    alpha: Annotated[float | None, typer.Option(help="finequant: of adaptive (0.35), adaptive-mean (0.87).")] = None,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="finequant, milo: a scale a group, or an offset too."),
    ] = None,
    search: Annotated[
        bool | None,
        typer.Option("--search/--no-search", help="finequant: scales of least squared error, or the paper's."),
    ] = None,
    scales: Annotated[str | None, typer.Option(help="finequant: stored scales, float16 (default) or bfloat16.")] = None,
    rotation: Annotated[
        str | None, typer.Option(help="codequant: learned, random, hadamard or none; default learned.")
    ] = None,
    hadamard: Annotated[
        bool | None,
        typer.Option(help="codequant: turn inputs that no offline rotation reaches; default with 4 activation bits."),
    ] = None,
    solver: Annotated[
        str | None, typer.Option(help="milo: lsq (default), hqq or rtn. qmoe: gptq (default) or rtn.")
    ] = None,
    rank: Annotated[
        str | None,
        typer.Option(help="milo: policies of the compensators, such as dense:512+kurtosis:16; default budget:5."),
    ] = None,
    rank_bits: Annotated[int | None, typer.Option(help="milo: bits of the compensators: 3 (default), 8 or 16.")] = None,
    refine: Annotated[
        bool | None,
        typer.Option("--refine/--no-refine", help="milo: quantize compensators in the loop, or at its end."),
    ] = None,
    memory_budget: Annotated[
        int | None, typer.Option(min=1, help="milo: bytes of all safetensors files of OUT, instead of --rank.")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="List what was chosen for every tensor.")] = False,
    device: Annotated[
        str | None,
        typer.Option(
            callback=usable_device, help="qmoe, codequant, milo: where the model or the solver runs; default cpu."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads to use; default: all cores.")] = None,
    resume: Annotated[
        bool, typer.Option(help="Continue an interrupted run of the same job; --no-resume starts over.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Compress the experts of MODEL into the packed directory OUT.

    An interrupted run leaves OUT.partial; the same command continues it.
    """
    from moepack.methods import create
    from moepack.pipeline import compress
    from moepack.progress import Silent, terminal_progress

    console = Console(stderr=True)
    progress = Silent() if quiet else terminal_progress(console)
    try:
        options: dict[str, str | int | float | bool | None] = {
            "calibration": calibration,
            "samples": samples,
            "sequence_length": sequence_length,
        }
        options |= {"bits": bits, "bits_per_weight": bits_per_weight, "device": device, "code": code}
        options |= {"group_size": _number(group_size), "dense_bits": dense_bits, "alpha": alpha}
        options |= {"weight_bits": weight_bits, "activation_bits": activation_bits}
        options |= {"block": _number(block), "steps": steps, "rotation": rotation, "hadamard": hadamard}
        options |= {"symmetric": symmetric, "search": search, "scales": scales}
        options |= {"solver": solver, "rank": rank, "rank_bits": rank_bits, "memory_budget": memory_budget}
        options |= {"refine": refine}
        given = {name: value for name, value in options.items() if value is not None}
        chosen = create(method, **given)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    try:
        done = compress(model, out, method=chosen, threads=threads, resume=resume, progress=progress)
    except KeyboardInterrupt:
        raise interrupted(console, out) from None
    except MoepackError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    print_report(done)
    if report:
        print_directory(out)


def _number(text: str | None) -> int | str | None:
    """A number where the text is one."""
    return int(text) if text is not None and text.isdecimal() else text


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
