"""The compression pipeline: the only place that knows checkpoints, methods and the format at once.

`job` does the work (`convert` for models in the QMoE authors' format), `plan` decides it, `journal` makes it resumable,
`report` counts it.
"""

from moepack.pipeline.convert import convert
from moepack.pipeline.job import PARTIAL, compress
from moepack.pipeline.report import CompressReport

__all__ = ["PARTIAL", "CompressReport", "compress", "convert"]
