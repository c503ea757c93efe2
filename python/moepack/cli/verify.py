"""`moepack verify`: check a packed directory for damage."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moepack.memory import importing
from moepack.units import size

SHOWN = 10
"""Maximum number of faults to print; the rest is counted."""


def verify_command(
    directory: Annotated[Path, typer.Argument(help="A packed directory.")],
    strict: Annotated[bool, typer.Option("--strict", help="Also fail if side files have changed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Check every byte, offset and code of DIRECTORY. Prints faults and exits with code 1 if there are any.

    Side files (a model card, a chat template) may be added or edited. They are listed and do not count as faults.
    """
    with importing():
        from moepack.format import VerifyReport, verify

    def show(report: VerifyReport) -> None:
        for fault in report.faults[:SHOWN]:
            print(f"fault: {fault}")
        if len(report.faults) > SHOWN:
            print(f"and {len(report.faults) - SHOWN} more")
        if report.side:
            print(f"changed side files: {', '.join(map(str, report.side))}")
        verdict = "sound" if report.ok else "DAMAGED"
        checked = f"{report.files} files, {size(report.nbytes)}, {report.tensors} packed tensors"
        print(f"{report.path} is {verdict}: {checked} checked in {report.seconds:.1f} s")

    report = verify(directory)
    if as_json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, default=str, indent=2))
    else:
        show(report)
    if not report.ok or (strict and report.side):
        raise typer.Exit(1)
