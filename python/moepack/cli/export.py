"""`moepack export`: write a packed directory in a format that other programs read."""

from pathlib import Path
from typing import Annotated

import typer

from moepack.cli.usage import wrong_usage
from moepack.units import size


def export_command(
    directory: Annotated[Path, typer.Argument(help="A packed directory.")],
    out: Annotated[Path, typer.Argument(help="Directory (gguf: file) to be made; it must not exist.")],
    to: Annotated[str, typer.Option(help="bf16, compressed-tensors or gguf.")] = "bf16",
    adapter: Annotated[
        Path | None, typer.Option(help="A LoRA adapter that peft saved, to be merged into the decoded weights (bf16).")
    ] = None,
) -> None:
    """Write DIRECTORY as an ordinary checkpoint (bf16), or its integers for compressed-tensors or GGUF."""
    from moepack.export import export

    with wrong_usage():
        written = export(directory, out, to, adapter)
    print(f"wrote      {out} ({size(written)})")
