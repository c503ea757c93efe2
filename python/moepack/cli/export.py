"""`moepack export`: convert a packed directory to a format that other programs read."""

from pathlib import Path
from typing import Annotated

import typer

from moepack.cli.usage import wrong_usage
from moepack.memory import importing
from moepack.units import size


def export_command(
    directory: Annotated[Path, typer.Argument(help="A packed directory.")],
    out: Annotated[Path, typer.Argument(help="Output directory (for gguf, a file). It must not exist.")],
    to: Annotated[str, typer.Option(help="Output format: bf16, compressed-tensors or gguf.")] = "bf16",
    adapter: Annotated[
        Path | None, typer.Option(help="Merge this LoRA adapter, saved by peft, into the decoded weights (bf16 only).")
    ] = None,
) -> None:
    """Export DIRECTORY as an ordinary checkpoint (bf16), or as integers for compressed-tensors or GGUF."""
    with importing():
        from moepack.export import export

    with wrong_usage():
        written = export(directory, out, to, adapter)
    print(f"wrote      {out} ({size(written)})")
