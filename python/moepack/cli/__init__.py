"""The `moepack` command line: one module per command, listed in `COMMANDS`.

The module of command NAME defines `NAME_command`, which typer turns into the command, or a function `command` that
returns it with options known only at run time. It may define `EPILOG`, the text below its options, or a function that
returns it. Modules import heavy packages (torch, the pipeline) inside the function so that `--help` stays fast.

Exit codes: 0 success, 1 an expected failure (one line on stderr) or damage found, 2 wrong usage, 130 Ctrl-C.
"""

import io
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
from moepack.system.interrupts import interrupts_kept, was_interrupted

COMMANDS = {
    "run": "run",
    "plan": "plan",
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
    "push": "push",
    "list": "library",
    "remove": "library",
    "doctor": "doctor",
    "models": "models",
    "methods": "methods",
    "trace": "trace",
}
"""Module of each command, in the order of the help."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moepack {import_module('moepack').__version__}")
        raise typer.Exit


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback on failure.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Compress Mixture-of-Experts checkpoints and run them packed."""


def make_app() -> typer.Typer:
    """Return the command line with the options of all methods that are registered now."""
    made = typer.Typer(
        name="moepack",
        help="Compress Mixture-of-Experts checkpoints and run them packed.",
        cls=LiteralGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    made.callback()(_options)
    for name, module in COMMANDS.items():
        content = import_module(f"{__name__}.{module}")
        make, epilog = getattr(content, "command", None), getattr(content, "EPILOG", None)
        function = make() if make else getattr(content, f"{name}_command")
        made.command(name, cls=LiteralCommand, epilog=epilog() if callable(epilog) else epilog)(function)
    return made


app = make_app()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: the arguments after the program name; None uses `sys.argv`.
    """
    given = sys.argv[1:] if arguments is None else arguments
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):  # an encoding may lack characters of texts and paths
        sys.stdout.reconfigure(errors="backslashreplace")
    _share_cores()
    try:
        with warnings.catch_warnings(), interrupts_kept():
            warnings.showwarning = partial(_show, warnings.showwarning)
            app(given)
    except Exception as error:
        if "--debug" in given:
            raise
        if was_interrupted() or _replaces_interrupt(error):
            sys.exit(130)
        foreseen = _foreseen(error)
        if foreseen is None:
            raise
        print(f"error: {foreseen}", file=sys.stderr)
        sys.exit(1)


def _open_streams() -> None:
    """Open standard streams that are closed, as some services start programs, on the null device."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _replaces_interrupt(error: BaseException | None) -> bool:
    """Return whether an error replaced a `KeyboardInterrupt`.

    Python 3.11 does so where it names the attributes of a class (`__set_name__`).
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _foreseen(error: Exception) -> MoepackError | None:
    """Return the error to report for an expected failure (of a file or a GPU), or None for a defect."""
    if isinstance(error, MoepackError):
        return error
    if isinstance(error, OSError):
        named = isinstance(error.filename, str | os.PathLike)
        return MoepackError(error.strerror or str(error), file=error.filename if named else None)
    return _of_a_device(error) if isinstance(error, RuntimeError) else None


def _of_a_device(error: RuntimeError) -> MoepackError | None:
    """Return the error to report for a GPU failure, or None. Call only after a torch error: imports torch."""
    found: MoepackError | None = import_module("moepack.backends.gpu").lost(error)
    return found


def _show(others: Callable[..., None], message: Warning | str, category: type[Warning], *place: Any) -> None:
    """Print a `MoepackWarning` in one line; pass any other warning to `others`, which also prints the code line."""
    if issubclass(category, MoepackWarning):
        print(f"warning: {message}", file=sys.stderr)
    else:
        others(message, category, *place)


def _share_cores() -> None:
    """Let idle torch threads sleep unless the user has set `OMP_WAIT_POLICY`. Call before torch is imported.

    By default, OpenMP threads spin between parallel regions and take cores from the packed kernels' threads and from
    other programs. On two cores with other load, sleeping raised decoding from 5-17 to 150 tokens/s, packed or not.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
