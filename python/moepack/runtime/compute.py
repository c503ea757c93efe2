"""How packed integer weights are multiplied: exactly, with activations quantized to int8, or rounded to bf16.

*exact* multiplies with the precision of float32: group-wise integers take activations as integers of 24 bits for each
token and group of columns. *int8* quantizes them to 8 bits: an error of at most 1/254 of the largest activation of the
group. *bf16* rounds weights and activations to bfloat16, 2^-8 of each, as an unpacked bfloat16 model has them; experts
with few tokens are multiplied exactly. One token costs nearly the same in all, for reading the weights takes the time;
many tokens are fastest in bf16 with AMX, in int8 without (docs/performance.md). Models whose activations have outliers
may notice int8; exact is the default.

The setting is one of the process; a model may have its own, which `moepack.load` sets. Formats without such a mode keep
their own: codebook tensors know exact and int8, ternary ones exact alone.
"""

import os

from torch import nn

__all__ = ["MODES", "VARIABLE", "compute_mode", "set_compute_mode"]

MODES = ("exact", "int8", "bf16")
VARIABLE = "MOEPACK_COMPUTE"
"""The environment variable that chooses the mode of the process when it starts."""

_chosen: str | None = None


def compute_mode() -> str:
    """Return the mode of the process: what was set, else what MOEPACK_COMPUTE says, else "exact".

    Raises:
        ValueError: MOEPACK_COMPUTE is no mode.
    """
    return _chosen or _checked(os.environ.get(VARIABLE) or "exact")


def set_compute_mode(mode: str | None, model: nn.Module | None = None) -> None:
    """Choose how packed integer weights are multiplied.

    Args:
        mode: "exact", "int8" or "bf16"; None goes back to the default: of the process, or of a model the process's
            mode.
        model: the model whose packed layers the choice is for; None sets the mode of the process.

    Raises:
        ValueError: there is no such mode.
    """
    global _chosen
    if mode is not None:
        _checked(mode)
    if model is None:
        _chosen = mode
        return
    from moepack.runtime.packed import PackedModule

    for module in model.modules():
        if isinstance(module, PackedModule):
            module.set_compute_mode(mode)


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"the compute mode must be one of {', '.join(MODES)}, not {mode!r}")
    return mode
