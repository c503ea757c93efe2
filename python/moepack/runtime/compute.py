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

from moepack.registry import OpenTensor

__all__ = ["MODES", "VARIABLE", "ComputingModule", "compute_mode", "product_mode", "set_compute_mode"]

MODES = ("exact", "int8", "bf16")
VARIABLE = "MOEPACK_COMPUTE"
"""The environment variable that chooses the mode of the process when it starts."""

_chosen: str | None = None


class ComputingModule(nn.Module):
    """A module with packed weights.

    Attributes:
        mode: "exact", "int8" or "bf16"; None follows the process.
    """

    mode: str | None = None


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
    for module in model.modules():
        if isinstance(module, ComputingModule):
            module.mode = mode


def product_mode(tensor: OpenTensor, mode: str | None) -> str | None:
    """Return the mode in which a tensor multiplies; None is its format's own.

    Args:
        tensor: the weights.
        mode: what their module says, or None.

    Returns:
        The module's mode, or the process's if that is another than "exact"; None where the format does not have it.
    """
    process = compute_mode()
    chosen = mode or (None if process == "exact" else process)
    return chosen if chosen in tensor.modes else None


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"the compute mode must be one of {', '.join(MODES)}, not {mode!r}")
    return mode
