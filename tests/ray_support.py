"""Objects that processes of a Ray cluster can import: slow or waiting methods, and node checks that fail."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from moepack.methods import FineQuant, Solution, Stage
from moepack.pipeline.distributed import probe

SECONDS = 0.3
LAST_LAYER, LAST = "model.layers.1.", "down_proj"


class Slow(FineQuant):
    """Group-wise integers that take some time per tensor."""

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        time.sleep(SECONDS)
        return super().solve(stage)


class Stuck(FineQuant):
    """Integers in groups; the last tensor never ends. Leaves the numbers of the processes that it runs in, in `pids`.

    Only one, so that a task that Ray begins out of turn leaves a core to those before it.
    """

    pids: Path

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        (self.pids / str(os.getpid())).touch()
        while stage.layer.startswith(LAST_LAYER) and LAST in stage.tensors:
            time.sleep(0.1)
        return super().solve(stage)


class OnGpus(FineQuant):
    """Integers in groups. Leaves the numbers of the GPUs that its tasks got in `given`."""

    given: Path

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        (self.given / os.environ.get("CUDA_VISIBLE_DEVICES", "none")).touch()
        return super().solve(stage)


def killing_look(stamps: Mapping[str, str]) -> probe.Findings:
    """Probe a node; kill it first if `KILL_NODE` is set there, or kill this process once if `KILL_PROCESS` is a
    path."""
    if "KILL_NODE" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if (path := os.environ.get("KILL_PROCESS")) and not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return probe.look(stamps)
