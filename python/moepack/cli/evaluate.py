"""`moepack eval`: loss and perplexity of a model on a text, and its divergence from a reference."""

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from moepack.cli.console import plain_console
from moepack.cli.options import AnyModel, Mode, Threads
from moepack.cli.placement import Approximate, Device, DeviceMemory, HostMemory, Misses, loading
from moepack.cli.usage import wrong_usage
from moepack.memory import importing
from moepack.units import size

__all__ = ["eval_command", "progress_bar", "quiet_transformers"]

LINE_INTERVAL = 5.0
"""Seconds between two progress lines in a log."""


def eval_command(
    directory: AnyModel,
    text: Annotated[
        Path | None, typer.Option(help="Evaluation text file (UTF-8).", exists=True, dir_okay=False)
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Compare with this model, usually the original, or with a saved reference.")
    ] = None,
    save_reference: Annotated[
        Path | None, typer.Option(help="Save the reference's predictions to this file, for a later --reference.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Run lm-eval tasks instead of a text, for example arc_easy,mmlu_*.")
    ] = None,
    task_path: Annotated[
        Path | None, typer.Option(help="Folder with your own lm-eval tasks (YAML).", exists=True, file_okay=False)
    ] = None,
    shots: Annotated[int | None, typer.Option(help="Few-shot examples per question.", min=0)] = None,
    limit: Annotated[int | None, typer.Option(help="Maximum questions per task.", min=1)] = None,
    chars: Annotated[int, typer.Option(help="Characters of the text to use.", min=1)] = 250_000,
    threads: Threads = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16, for both models.")] = "float32",
    mode: Mode = None,
    device: Device = None,
    host_memory: HostMemory = None,
    device_memory: DeviceMemory = None,
    misses: Misses = None,
    approximate: Approximate = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Measure loss and perplexity on a text, or run lm-eval tasks.

    --reference adds KL divergence and top-1 agreement. The reference runs first, block by block if it does not fit in
    memory, and is freed before the model is loaded.
    """
    with importing():
        from moepack.backends.threads import set_threads
        from moepack.evaluation import evaluate
        from moepack.evaluation.tasks import evaluate_tasks

    quiet_transformers()
    if threads is not None:
        set_threads(threads)
    with progress_bar() as progress, wrong_usage():
        if (text is None) == (tasks is None):
            raise ValueError("give either --text or --tasks")
        if save_reference is not None and reference is None:
            raise ValueError("--save-reference needs --reference")
        of_tasks = {"--task-path": task_path, "--shots": shots, "--limit": limit}
        if tasks is not None and reference is not None:
            raise ValueError("--reference needs --text")
        if tasks is None and (unused := [name for name, value in of_tasks.items() if value is not None]):
            raise ValueError(f"{unused[0]} needs --tasks")
        caps = host_memory, device_memory, misses
        options = vars(loading(dtype, threads, mode, device, *caps, approximate=approximate))
        if tasks is not None:
            asked = {"shots": shots, "limit": limit, **options}
            _print_tasks(directory, evaluate_tasks(directory, tasks.split(","), task_path, **asked), as_json)
            return
        assert text is not None
        more = {"progress": progress, "save_reference": save_reference}
        report = evaluate(directory, text, chars, reference, **more, **options)
    if as_json:
        print(json.dumps({"model": str(directory), "text": str(text), **report.to_json()}))
    else:
        plain_console().print(_table(report.to_json()))


def quiet_transformers() -> None:
    """Turn off transformers' progress bars and warnings."""
    with importing():
        from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _print_tasks(directory: Path, results: dict[str, dict[str, float]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"model": str(directory), "results": results}))
        return
    table = Table("task", "measure", "value", "standard error", box=None)
    for task, measures in results.items():
        for name, value in measures.items():
            if not (stem := name.partition(","))[0].endswith("_stderr"):
                error = measures.get(f"{stem[0]}_stderr{stem[1]}{stem[2]}")
                table.add_row(task, name, f"{value:.4f}", "" if error is None else f"{error:.4f}")
    plain_console().print(table)


def _table(figures: dict[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    rows = {
        "loss": ("loss (nats per token)", "{:.5f}"),
        "perplexity": ("perplexity", "{:.4f}"),
        "reference_loss": ("reference loss", "{:.5f}"),
        "reference_perplexity": ("reference perplexity", "{:.4f}"),
        "kl": ("mean KL(reference || model)", "{:.5f}"),
        "top1_agreement": ("top-1 agreement", "{:.2%}"),
        "tokens": ("tokens", "{:,}"),
        "seconds": ("seconds", "{:.1f}"),
    }
    for name, (label, form) in rows.items():
        if name in figures:
            table.add_row(label, form.format(figures[name]))
    table.add_row("peak memory, without mapped weights", size(figures["peak_memory"]))
    return table


@contextmanager
def progress_bar() -> Iterator[Any]:
    """Show a progress bar on stderr with windows, loss and time left; in a log, print a line every few seconds."""
    console = plain_console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda *event: bar.update(task, completed=event[0], total=event[1], description=_stage(event[2]))


def _stage(loss: float) -> str:
    """Return the label of the running stage. The loss is NaN while the reference runs."""
    return "reference" if math.isnan(loss) else f"loss {loss:.4f}"


class _Lines:
    """Prints a plain line every `LINE_INTERVAL` seconds, for output that is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._last = time.perf_counter()

    def __call__(self, done: int, total: int, loss: float) -> None:
        now = time.perf_counter()
        if now - self._last >= LINE_INTERVAL:
            self._last = now
            self._console.print(f"{_stage(loss)}, {done} of {total}")
