"""Importable by processes of a cluster: methods that take their time or wait, and looks at a node that end badly."""

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from moepack.methods import FineQuant, Solution, Stage
from moepack.pipeline.distributed import probe

SECONDS = 0.3
FIRST_LAYER = "model.layers.0."


class Slow(FineQuant):
    """Integers in groups, some time a tensor."""

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        time.sleep(SECONDS)
        return super().solve(stage)


class Stuck(FineQuant):
    """Integers in groups for the first layer; all others never end. Leaves the process's number in `pids`."""

    pids: Path

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        (self.pids / str(os.getpid())).touch()
        while not stage.layer.startswith(FIRST_LAYER):
            time.sleep(0.1)
        return super().solve(stage)


def killing_look(stamps: Mapping[str, str]) -> probe.Findings:
    """Look at a node; kill it first if `KILL_NODE` is set there, or once this process if `KILL_PROCESS` is a path."""
    if "KILL_NODE" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    if (path := os.environ.get("KILL_PROCESS")) and not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return probe.look(stamps)
