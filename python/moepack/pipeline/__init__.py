"""The compression pipeline: the only place that knows checkpoints, methods and the format at once.

`job` does the work (`convert` for models in the QMoE authors' format): `plan` decides what is written, `assignment`
which method packs what, `solving` runs the methods over the layers, `journal` and `sources` make it resumable, and
`report` counts.
"""

from moepack.pipeline.assignment import Assignment
from moepack.pipeline.convert import convert
from moepack.pipeline.job import PARTIAL, compress
from moepack.pipeline.report import CompressReport

__all__ = ["PARTIAL", "Assignment", "CompressReport", "compress", "convert"]
