"""Run `compress` repeatedly, kill it at increasingly late moments, and resume it. A standalone script.

    python crash_worker.py MODEL WORK_DIRECTORY [METHOD [KILLS]]

Forks before any thread exists. The child counts everything that reaches the disk (writes, flushes, renames, removals)
and kills itself with SIGKILL during the k-th operation; a write is interrupted after half of its bytes. A second child
then resumes, and the result must equal an uninterrupted run byte for byte. All moments are tried, or KILLS of them,
spread over the run. Prints the number of kills.

Methods that run the model read WORK_DIRECTORY/text.txt.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Imported here, because each child would import them again.
import tokenizers  # noqa: F401
import transformers.models.auto.tokenization_auto
import transformers.models.mixtral.modeling_mixtral  # noqa: F401

import moepack.methods
import moepack.pipeline.job
from fork_support import forked
from moepack.format import atomic, shard
from moepack.methods.qmoe.ternary import Ternary


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def arm(moment: int = 0) -> list[int]:
    """Make this process kill itself at the given operation, if any; return the counter of remaining operations."""
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

    for name in ("fsync", "rename", "replace", "unlink", "mkdir"):
        setattr(os, name, guard(getattr(os, name)))
    atomic.write_all = shard.write_all = torn_write
    return left


def main(model: Path, work: Path, name: str = "ternary", wanted: int = 0) -> None:
    def compress(out: Path) -> None:
        seen = {"calibration": str(work / "text.txt"), "samples": 4, "sequence_length": 32}
        settings = {name: seen for name in ("codequant", "floe", "qmoe")}
        settings |= {"auto": {**seen, "bits_per_weight": 6.0}, "rate": {"bits_per_weight": 2.5, "calibration": "none"}}
        settings |= {"finequant": {"calibration": "none"}}
        method = Ternary() if name == "ternary" else moepack.methods.create(name, **settings.get(name, {}))
        moepack.pipeline.job.compress(model, out, method=method, threads=1)

    def counted() -> None:
        left = arm()
        compress(work / "reference")
        (work / "moments").write_text(str(-left[0]))

    assert forked(counted) == 0
    reference, last = contents(work / "reference"), int((work / "moments").read_text())
    out, partial = work / "out", work / "out.partial"
    kills = 0
    while not wanted or kills < wanted:
        moment = 1 + (last * (2 * kills + 1) // (2 * wanted) if wanted else kills)

        def killed(moment: int = moment) -> None:
            arm(moment)
            compress(out)

        status = forked(killed)
        if status == 0 and not wanted:
            break
        assert status == -signal.SIGKILL, (moment, status)
        kills += 1
        if out.exists():
            assert not partial.exists()
        else:
            assert forked(lambda: compress(out)) == 0, f"cannot continue after moment {moment}"
        assert contents(out) == reference, f"other bytes after a kill at moment {moment}"
        assert not partial.exists()
        shutil.rmtree(out)
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4], *map(int, sys.argv[4:]))
