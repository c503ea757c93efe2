"""`moepack trace`: record which experts a text uses, and replay the trace through expert caches."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moepack.cli.console import plain_console
from moepack.cli.options import Dtype
from moepack.cli.usage import require_place, wrong_usage
from moepack.errors import LoadError
from moepack.memory import importing

__all__ = ["trace_command"]

SHARES = (0.125, 0.25, 0.375, 0.5, 0.75)
"""Cache sizes, as fractions of all experts."""


def trace_command(
    source: Annotated[Path, typer.Argument(help="Packed directory, or a trace saved with --out.")],
    text: Annotated[Path | None, typer.Option(help="Text file (UTF-8) to record.", exists=True, dir_okay=False)] = None,
    chars: Annotated[int, typer.Option(help="Characters of the text to use.", min=1)] = 20_000,
    out: Annotated[Path | None, typer.Option(help="Save the trace to this file (npz).")] = None,
    dtype: Dtype = "auto",
) -> None:
    """Record which experts a text uses, or read a saved trace, and show the hit rates of caches by size and policy."""
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.evaluation import evaluate
        from moepack.integrations.loading import load, open_tokenizer
        from moepack.stores.streaming.trace import POLICIES, Trace, hit_rate, recorded

    quiet_transformers()
    with wrong_usage():
        require_place(out)
        if source.is_file():
            trace = Trace.open(source)
        elif source.suffix == ".npz":
            raise LoadError("no such file", file=source)
        elif text is None:
            raise ValueError("--text is needed to record a trace")
        else:
            model = load(source, dtype)
            with recorded(model) as found:
                evaluate(model, text, chars, tokenizer=open_tokenizer(source))
            trace = found()
    if out is not None:
        trace.save(out)
    tokens, layers, chosen = trace.chosen.shape
    console = plain_console()
    console.print(f"{tokens} tokens, {layers} layers of {trace.experts} experts, {chosen} per token")
    table = Table("experts in memory", *POLICIES, box=None)
    for share in SHARES:
        capacity = max(1, int(share * trace.size))
        rates = (f"{hit_rate(trace, policy, capacity):.1%}" for policy in POLICIES)
        table.add_row(f"{capacity} ({share:.1%})", *rates)
    console.print(table)
