"""`moepack push`: upload a packed directory to the Hub."""

from pathlib import Path
from typing import Annotated

import typer

from moepack.memory import importing

__all__ = ["push_command"]


def push_command(
    directory: Annotated[Path, typer.Argument(help="A packed directory.")],
    name: Annotated[str, typer.Argument(help="Hub id: ORGANIZATION/NAME. It is created if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Create a private model.")] = False,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the original, for the model card. Default: that of recipe.yaml.")
    ] = None,
) -> None:
    """Upload DIRECTORY to the Hub with its model card. Log in first: `hf auth login`.

    Without a card of `moepack report`, a card without measurements is written.
    """
    with importing():
        from moepack.cli.evaluate import quiet_transformers
        from moepack.report.upload import push

    quiet_transformers()
    model, commit = push(directory, name, private=private, base_model=base_model)
    print(f"uploaded  {model}")
    print(f"commit    {commit}")
