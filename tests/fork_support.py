"""Runs scripts in processes of their own that need not import torch and transformers, which takes five seconds.

A server without threads has imported `preloaded` and forks for each script. The hub is offline there.
"""

import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

_fork = os.fork


@dataclass(frozen=True)
class Finished:
    """The exit code of a script, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: Path, *arguments: object, folder: Path, timeout: float | None = 600) -> Finished:
    """Run a script to its end; `folder` receives its output and its temporary files."""
    process = _server().Process(target=_run, args=(script, [str(script), *map(str, arguments)], folder))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"{script.name} takes more than {timeout} seconds")
    return Finished(process.exitcode, *((folder / name).read_text() for name in ("stdout", "stderr")))


@cache
def _server() -> Any:
    """Start the server.

    Python 3.11 does not tell it `sys.path`, and it silently goes on without a module that it does not find. Scripts
    fork after torch has computed, so it has one thread: a child waits forever for the other threads of OpenMP.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    path = os.pathsep.join(path for path in sys.path if path)
    with patch.dict(os.environ, PYTHONPATH=path, OMP_NUM_THREADS="1"):
        forkserver.ensure_running()
    return context


def _run(script: Path, arguments: list[str], folder: Path) -> None:
    assert "preloaded" in sys.modules
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run in the background, where it is ignored
    sys.argv, tempfile.tempdir = arguments, str(folder)
    sys.path.insert(0, str(script.parent))  # as `python SCRIPT` does
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the processes that it starts
    runpy.run_path(str(script), run_name="__main__")


def forked(work: Callable[[], object]) -> int:
    """Run a function in a child; return its exit code, 1 after an exception, which it prints, or minus its signal."""
    child = _fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
