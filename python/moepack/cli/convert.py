"""`moepack convert`: convert a model in the QMoE authors' format into a packed directory."""

from pathlib import Path
from typing import Annotated

import typer

from moepack.cli import options
from moepack.cli.console import plain_console
from moepack.cli.usage import wrong_usage
from moepack.memory import importing


def convert_command(
    published: Annotated[Path, typer.Argument(help="Directory of the authors' files: noexp.pt, exp00.pt, ...")],
    out: Annotated[Path, typer.Argument(help="Output directory. It must not exist.")],
    original: Annotated[
        Path | None,
        typer.Option(help="Directory of the original Switch model: provides config, tokenizer and dense weights."),
    ] = None,
    code: Annotated[
        str, typer.Option(help="Entropy code: `fsv8` (one-byte codes), or `dict16` (16-bit codes, as published).")
    ] = "fsv8",
    threads: options.Threads = None,
    resume: options.Resume = True,
    quiet: options.Quiet = False,
) -> None:
    """Convert PUBLISHED, a model in the QMoE authors' format, losslessly into the packed directory OUT.

    An interrupted run leaves OUT.partial; run the same command again to continue.
    """
    with importing():
        from moepack.cli.compress import interrupted, print_report
        from moepack.pipeline import convert
        from moepack.progress import terminal_progress

    console = plain_console(stderr=True)
    progress = terminal_progress(console, quiet)
    try:
        with wrong_usage():
            report = convert(
                published, out, original=original, code=code, threads=threads, resume=resume, progress=progress
            )
    except KeyboardInterrupt:
        raise interrupted(console, out) from None
    print_report(report)
