"""Options that several commands have."""

from typing import Annotated

import typer

Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Threads to use; default: all cores.")]
Resume = Annotated[bool, typer.Option(help="Continue an interrupted run of the same job; --no-resume starts over.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
