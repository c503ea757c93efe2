"""How tokens are drawn, wherever that happens: in `moepack.serving.text.sampling`, or on a GPU (`cuda/draw.cu`).

The host makes the random numbers, so a sequence gets the same tokens in both, up to the rounding of sums and to equal
logits at the limits of top-k and top-p, which the GPU keeps.
"""

from typing import NamedTuple

__all__ = ["COLDEST", "GREEDY", "Draw"]

COLDEST = 1e-6
"""The lowest divisor of logits: float32 logits overflow with less. Sampling is already greedy at this temperature."""


class Draw(NamedTuple):
    """How the next token of a sequence is drawn.

    Attributes:
        temperature: of the logits; 0 chooses the likeliest token.
        top_k: keep this many of the likeliest tokens; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities sum to this.
        min_p: exclude tokens below this fraction of the largest probability.
        uniform: the random number, in [0, 1).
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    uniform: float


GREEDY = Draw(0.0, 0, 1.0, 0.0, 0.0)
