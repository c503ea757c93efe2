"""Run `compress` again and again, each time killed at a later moment, and continue it. A script of its own.

    python crash_worker.py MODEL WORK_DIRECTORY

Forks before any thread exists; the child counts everything that reaches the disk (writes, flushes, renames, removals)
and kills itself with SIGKILL in the middle of the k-th, after half of its bytes where it is a write. Then a second
child continues, and the result must equal an uninterrupted run byte for byte. Prints how many moments there were.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import moepack.methods
import moepack.pipeline.job
from moepack.format import atomic, shard


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a child; return its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(f"child: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def arm(moment: int) -> None:
    """Make this process kill itself at the given moment."""
    left = [moment]

    def die_when_due() -> bool:
        left[0] -= 1
        return left[0] == 0

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **keywords: Any) -> Any:
            if die_when_due():
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return guarded

    write_all = atomic.write_all

    def torn_write(file: Any, data: memoryview) -> None:
        if die_when_due():
            write_all(file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write_all(file, data)

    os.fsync, os.rename, os.unlink, os.mkdir = map(guard, (os.fsync, os.rename, os.unlink, os.mkdir))
    atomic.write_all = shard.write_all = torn_write


def main(model: Path, work: Path) -> None:
    compress = moepack.pipeline.job.compress
    assert forked(lambda: compress(model, work / "reference", method="ternary", threads=1)) == 0
    reference = contents(work / "reference")
    out, partial = work / "out", work / "out.partial"
    moment = 0
    while True:
        moment += 1

        def killed(moment: int = moment) -> None:
            arm(moment)
            compress(model, out, method="ternary", threads=1)

        status = forked(killed)
        if status == 0:
            break
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (moment, status)
        if out.exists():
            assert not partial.exists()
        else:
            assert forked(lambda: compress(model, out, method="ternary", threads=1)) == 0, (
                f"cannot continue after moment {moment}"
            )
        assert contents(out) == reference, f"other bytes after a kill at moment {moment}"
        assert not partial.exists()
        shutil.rmtree(out)
    print(moment - 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
