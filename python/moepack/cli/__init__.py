"""The command line `moepack`: one module a command, listed in `COMMANDS`.

The module of the command NAME offers `NAME_command`, the function that typer makes a command of, and may offer
`EPILOG`, the text below its options. Modules import what is
heavy (torch, the pipeline) inside the function, so that `--help` is quick.

Exit codes: 0 success, 1 a foreseen failure (one line on standard error) or damage found, 2 wrong usage, 130 Ctrl-C.
"""

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer

from moepack.cli.literal import LiteralCommand, LiteralGroup
from moepack.errors import MoepackError, MoepackWarning

COMMANDS = {
    "compress": "compress",
    "compare": "compare",
    "tune": "tune",
    "convert": "convert",
    "inspect": "inspect",
    "verify": "verify",
    "eval": "evaluate",
    "report": "report",
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "export": "export",
    "doctor": "doctor",
    "models": "models",
    "trace": "trace",
}
"""Commands in the order of the help, and their modules here."""

app = typer.Typer(
    name="moepack",
    help="Compress Mixture-of-Experts checkpoints and run them packed.",
    cls=LiteralGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for _name, _module in COMMANDS.items():
    _content = import_module(f"{__name__}.{_module}")
    _make = app.command(_name, cls=LiteralCommand, epilog=getattr(_content, "EPILOG", None))
    _make(getattr(_content, f"{_name}_command"))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moepack {import_module('moepack').__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compress Mixture-of-Experts checkpoints and run them packed."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: what follows the program's name; None takes it from the process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    _share_cores()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = partial(_show, warnings.showwarning)
            app(given)
    except (MoepackError, RuntimeError, OSError) as error:
        foreseen = _foreseen(error)
        if foreseen is None or "--debug" in given:
            raise
        print(f"error: {foreseen}", file=sys.stderr)
        sys.exit(1)


def _foreseen(error: Exception) -> MoepackError | None:
    """What a failure means, unless it is a defect: of a file that the system refuses, or of a GPU."""
    if isinstance(error, MoepackError):
        return error
    if isinstance(error, OSError):
        named = isinstance(error.filename, str | os.PathLike)
        return MoepackError(error.strerror or str(error), file=error.filename if named else None)
    return _of_a_device(error) if isinstance(error, RuntimeError) else None


def _of_a_device(error: RuntimeError) -> MoepackError | None:
    """What a failure of a GPU means, if it is one; torch is imported by now, or was to be."""
    found: MoepackError | None = import_module("moepack.runtime.backends.gpu").lost(error)
    return found


def _show(others: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any) -> None:
    """Print a warning of moepack's own in one line; leave `others` to Python, which tells the line of code."""
    if issubclass(category, MoepackWarning):
        print(f"warning: {message}", file=sys.stderr)
    else:
        others(message, category, *place)


def _share_cores() -> None:
    """Let torch's idle threads sleep, unless the user has decided otherwise; torch must not be imported yet.

    By default OpenMP's threads spin between parallel regions. They take the cores that the packed kernels' threads, and
    other programs, could use: on two cores with other work, decoding went from 5-17 to 150 tokens/s, packed or not.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
