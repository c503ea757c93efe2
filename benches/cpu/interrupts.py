"""Measures how long commands continue after Ctrl-C.

    python -m benches.cpu.interrupts [MODEL]

Each command runs in its own process, is interrupted (SIGINT) at several moments, and must end with exit code 130.
Prints a JSON object: for each command the longest time in seconds from the signal to the end, and the exit codes.

Libraries are imported first: some extensions abort the process (SIGABRT) if their import is interrupted.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from pydantic import TypeAdapter  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
from transformers.models.mixtral import modeling_mixtral  # noqa: F401

import moepack.evaluation
import moepack.export
import moepack.integrations.loading
import moepack.pipeline
import moepack.serving.text.generation  # noqa: F401
from moepack.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
MOMENTS = (0.02, 0.1, 0.5, 2.0)
"""Seconds after the start at which a command is interrupted."""


def forked(arguments: list[str]) -> int:
    """Run a command without output in a child process; return its id."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the child handles it
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return child
    code = 1
    try:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if this program runs in the background
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    os._exit(code)


def interrupted(arguments: list[str], moment: float) -> tuple[float | None, int]:
    """Seconds from SIGINT to the end of a command, None if it ended before the moment, and its exit code."""
    child, due = forked(arguments), time.monotonic() + moment
    while (start := time.monotonic()) < due:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return None, os.waitstatus_to_exitcode(status)
        time.sleep(min(0.01, due - start))
    os.kill(child, signal.SIGINT)
    status = os.waitpid(child, 0)[1]
    return time.monotonic() - start, os.waitstatus_to_exitcode(status)


def commands(model: Path, packed: Path, work: Path) -> dict[str, list[str]]:
    """A command line for each command that takes time, and for each method of `compress`."""
    text = str(EXAMPLES / "texts" / "white-fang.txt")
    seen = ["--calibration", text, "--samples", "64", "--sequence-length", "512"]
    free = ["--calibration", "none"]
    methods = {"finequant": free, "milo": [], "rate": ["--bits-per-weight", "2.5", *free]}
    found = {
        f"compress {method}": ["compress", str(model), str(work / "out"), "--method", method, "--no-resume", *more]
        for method, more in {**methods, "codequant": seen, "qmoe": seen}.items()
    }
    found["verify"] = ["verify", str(packed)]
    found["eval"] = ["eval", str(packed), "--text", text]
    found["generate"] = ["generate", str(packed), "--prompt", "She opened", "--max-new-tokens", "2000"]
    found["export"] = ["export", str(packed), str(work / "exported")]
    return found


def measure(model: Path, work: Path) -> dict[str, dict[str, object]]:
    """Interrupt every command at every moment before its end."""
    packed = work / "packed"
    compress = ["compress", str(model), str(packed), "--method", "finequant", "--calibration", "none"]
    assert os.waitstatus_to_exitcode(os.waitpid(forked(compress), 0)[1]) == 0
    found = {}
    for name, arguments in commands(model, packed, work).items():
        times, codes = [0.0], []
        for moment in MOMENTS:
            seconds, code = interrupted(arguments, moment)
            codes.append(code)
            for left in (*work.glob("out*"), *work.glob("exported*")):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            if seconds is None:
                break
            times.append(seconds)
        found[name] = {"seconds": round(max(times), 3), "codes": codes}
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        source = Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLES / "tiny-moe"
        print(json.dumps(measure(source, Path(place)), indent=1))
