"""The process itself: its limits, and another program in its place."""

import os
import sys
from typing import NoReturn

__all__ = ["raise_open_files", "run_instead"]


if sys.platform == "win32":
    import subprocess

    def _raise_open_files(wanted: int) -> None:
        pass  # sockets are not limited there

    def _run_instead(command: list[str]) -> NoReturn:
        # `exec` there starts a new process and ends this one, and the shell does not wait for the new one.
        with subprocess.Popen(command) as started:
            while True:
                try:
                    sys.exit(started.wait())
                except KeyboardInterrupt:  # the console sends Ctrl-C to both processes
                    continue

else:
    import resource
    from contextlib import suppress

    def _raise_open_files(wanted: int) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            with suppress(OSError, ValueError):  # macOS may accept less than the hard limit
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

    def _run_instead(command: list[str]) -> NoReturn:
        os.execv(command[0], command)


def raise_open_files(wanted: int) -> None:
    """Raise the soft limit of open files, which is often 1024, to `wanted` or what the hard limit allows."""
    _raise_open_files(wanted)


def run_instead(command: list[str]) -> NoReturn:
    """Run a program in place of this one, with its console and exit code."""
    _run_instead(command)
