"""The settings of the method `codequant`."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from moepack.methods import shared
from moepack.methods.settings import Settings, setting

__all__ = ["ROW", "CodeQuantSettings"]

ROW = "row"


@dataclass
class CodeQuantSettings(Settings):
    """The settings."""

    calibration: str = shared.calibration(note="by default `built-in`")
    samples: int = shared.samples()
    sequence_length: int = shared.sequence_length()
    weight_bits: int = setting(4, help="Bits per code", users="expert", choices=(2, 3, 4))
    activation_bits: int = setting(
        16,
        help="Bits of activations: 8 or 4 rounds the inputs of packed layers per token, so that integers are "
        "multiplied; 16 (default) does not round.",
        shown="",
        users="expert",
        choices=(4, 8, 16),
    )
    block: int | str = setting(
        ROW, help="Columns per codebook: a multiple of 128, or `row` for a whole row", users="expert"
    )
    start: Literal["kmeans", "uniform"] = setting(
        "kmeans", help="Initial centroids; `uniform` with 0 steps is rounding to nearest, a baseline"
    )
    steps: int = setting(4, help="Refinement passes over codes and centroids", users="expert", minimum=0)
    # "diagonal" is the paper's equation 8 (see `moepack.solvers.codebooks`).
    assignment: Literal["columns", "diagonal"] = setting("columns", help="How codes are assigned")
    weighted: bool = setting(True, help="Weight the initial k-means by the diagonal of the Hessian")
    damping: float = setting(0.05, help="Added to the diagonal of the Hessians, relative to its mean")
    # The difference between X and X~ in equation 5. Values other than 0 run the original model beside the compressed
    # one. The correction mistakes the noise of rounded activations for error of earlier layers
    # (docs/methods/codequant.md).
    drift: float | None = setting(
        None,
        help="Share of the error accumulated in earlier layers that is corrected by moving the weights",
        shown="0.5 with 8-bit activations, otherwise 0",
        minimum=0,
        maximum=1,
    )
    weigh_tokens: bool = setting(
        True, help="Weight each token by its effect on the layer's weighted sum (equation 6) instead of 1"
    )
    rotation: Literal["learned", "random", "hadamard", "none"] = setting(
        "learned", help="Offline rotation of the residual stream, folded into all weights", users="expert"
    )
    rotation_steps: int = setting(256, help="Gradient steps of a learned rotation", minimum=0)
    seed: int = setting(0, help="Seed of the rotation")
    # Output and down projections, and DeepSeek's latent projections, have inputs that no offline rotation reaches.
    hadamard: bool | None = setting(
        None,
        help="Rotate inputs at run time where no offline rotation applies. Default: only with 4-bit activations.",
        users="expert",
        option="--hadamard/--no-hadamard",
    )
    # Off by default: it helped one model of two.
    permute: bool = setting(False, help="With blocks, reorder inner dimensions so that similar columns share codebooks")
    dense: str = setting(
        "attention,shared,mlp", help="Linear layers to pack besides the experts: roles, separated by commas"
    )
    group: int = shared.group()
    minimum_tokens: int = shared.minimum_tokens()
    device: str = shared.device()
    name: ClassVar[str] = "codequant"
    summary: ClassVar[str] = (
        "fitted codebooks with codes of 4, 3 or 2 bits, for activations of 16, 8 or 4 bits; needs a calibration text"
    )
    implementation: ClassVar[str] = "moepack.methods.codequant.method:CodeQuant"
    seconds: ClassVar[float | None] = 2000
