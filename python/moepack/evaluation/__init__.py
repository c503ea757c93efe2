"""Measures the loss of a model on a text and its divergence from a reference.

The procedure is fixed, so that figures are comparable across models and versions: `windows` defines which tokens are
predicted. The loss is in nats per token. Nothing here depends on the packed formats.

The reference runs first and writes its predictions to a file (`reference`), block by block if it is larger than memory
(`streaming`). Then the model is loaded and compared with that file (`measure`), so only one model is in memory at a
time.
"""

from moepack.evaluation.measure import EvaluationReport, evaluate
from moepack.evaluation.reference import Reference, record_reference
from moepack.evaluation.windows import span_corrupt

__all__ = ["EvaluationReport", "Reference", "evaluate", "record_reference", "span_corrupt"]
