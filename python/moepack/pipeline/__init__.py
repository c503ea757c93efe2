"""The compression pipeline. No other room imports checkpoints, methods and the format together.

`job` runs a compression; `convert` converts models in the QMoE authors' format. `outputs` decides which files are
written, `assignment` which method packs each tensor, and `solving` runs the methods over the layers. `journal` and
`digests` make a job resumable. `report` counts bytes and weights.
"""

from moepack.pipeline.assignment import Assignment
from moepack.pipeline.convert import convert
from moepack.pipeline.job import compress
from moepack.pipeline.journal import PARTIAL
from moepack.pipeline.report import CompressReport

__all__ = ["PARTIAL", "Assignment", "CompressReport", "compress", "convert"]
