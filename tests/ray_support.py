"""A method that takes its time, importable by processes of a cluster, and what tells when it began."""

import time
from collections.abc import Mapping
from pathlib import Path

from moepack.methods import FineQuant, Solution, Stage

SECONDS = 0.3


class Slow(FineQuant):
    """Integers in groups, some time a tensor; leaves a file in `marks` for each tensor that is begun."""

    marks: Path | None = None

    def solve(self, stage: Stage) -> Mapping[str, Solution]:
        if self.marks is not None:
            (self.marks / f"{stage.layer}.{min(stage.tensors)}").touch()
        time.sleep(SECONDS)
        return super().solve(stage)
