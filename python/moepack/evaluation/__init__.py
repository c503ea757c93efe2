"""How good a model is: its loss on a text, and how far it has moved from a reference.

The yardstick is fixed, so that figures compare across models and versions: `windows` says which tokens are predicted.
Loss is in nats a token. Nothing here depends on how, or whether, the weights are packed.

The reference goes first and leaves its predictions in a file (`reference`), block by block where it is larger than the
memory (`streaming`); then the model is loaded and compared with that file (`measure`). So one model is in memory at a
time.
"""

from moepack.evaluation.measure import EvaluationReport, evaluate
from moepack.evaluation.reference import Reference, record_reference
from moepack.evaluation.windows import span_corrupt

__all__ = ["EvaluationReport", "Reference", "evaluate", "record_reference", "span_corrupt"]
