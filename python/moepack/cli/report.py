"""`moepack report`: write an HTML report and a model card for a packed directory."""

from pathlib import Path
from typing import Annotated

import typer

from moepack.cli.evaluate import progress_bar, quiet_transformers
from moepack.cli.options import Threads
from moepack.cli.usage import wrong_usage
from moepack.memory import importing

__all__ = ["report_command"]


def report_command(
    directory: Annotated[Path, typer.Argument(help="A packed directory.")],
    reference: Annotated[
        Path | None, typer.Option(help="The original model: directory, Hub id or saved reference.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file (UTF-8) for the evaluation and the samples.", exists=True, dir_okay=False),
    ] = None,
    chars: Annotated[int, typer.Option(help="Characters of the text to use.", min=1)] = 250_000,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt that both models continue; may be repeated.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the original, for the model card.")] = None,
    threads: Threads = None,
) -> None:
    """Write report.html (sizes, formats, quality, sample texts) and a model card README.md into DIRECTORY.

    --text measures the loss; --reference adds the divergence from the original. `moepack verify` still passes.
    """
    with importing():
        from moepack.backends.threads import set_threads
        from moepack.report.writing import write_report

    quiet_transformers()
    if threads is not None:
        set_threads(threads)
    with wrong_usage(), progress_bar() as progress:
        for option, given in (("--prompt", prompt), ("--reference", reference)):
            if given and text is None:
                raise ValueError(f"{option} needs --text")
        options = {"chars": chars, "prompts": prompt or (), "base_model": base_model, "progress": progress}
        written = write_report(directory, reference, text, **options)
    print(f"report      {written.page}")
    print(f"model card  {written.card}")
    if written.quality is None:
        print("quality     not measured: add --reference MODEL --text FILE")
