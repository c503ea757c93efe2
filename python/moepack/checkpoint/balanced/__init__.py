"""The balanced form of a checkpoint: the same function, with scales that do not depend on how it was written down.

Gains of norms, channels of experts, and values of attention have scales that the layers behind them undo, so a
checkpoint's own scales are arbitrary. Most packed formats share one scale between columns of a row and lose more if the
columns differ in magnitude. In the balanced form, the columns of packed matrices have equal magnitudes; the factors go
into the tensors in front of them (docs/methods/sensitivity.md).
"""

from moepack.checkpoint.balanced.rewriting import Balanced, BalancedCheckpoint, balanced

__all__ = ["Balanced", "BalancedCheckpoint", "balanced"]
