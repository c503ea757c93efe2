"""How packed weights are multiplied: exactly, rounded to bf16, with activations quantized to int8, or what fits.

*auto*, the default, multiplies few tokens of an expert as *exact* does and many as *bf16* wherever that is faster;
tensors made for rounded activations round them, and up projections of 2 bits that decide over channels (docs/methods/
floe.md) take activations of 8 bits. *exact* multiplies with the precision of float32: group-wise integers
take activations as integers of 24 bits for each token and group of columns. *bf16* rounds weights and activations of
many tokens to bfloat16, 2^-8 of each, as an unpacked bfloat16 model has them. *int8* quantizes activations to 8 bits:
an error of at most 1/254 of the largest activation of the group, which models whose activations have outliers may
notice. One token costs nearly the same in all, for reading the weights takes the time (docs/performance.md).

The setting is one of the process; a model may have its own, which `moepack.load` sets. A format that lacks a mode
takes auto.
"""

import os

from torch import nn

from moepack.registry import OpenTensor

__all__ = ["MODES", "VARIABLE", "ComputingModule", "compute_mode", "product_mode", "set_compute_mode"]

MODES = ("auto", "exact", "bf16", "int8")
VARIABLE = "MOEPACK_COMPUTE"
"""The environment variable that chooses the mode of the process when it starts."""

_chosen: str | None = None


class ComputingModule(nn.Module):
    """A module with packed weights.

    Attributes:
        mode: one of `MODES`; None follows the process.
    """

    mode: str | None = None


def compute_mode() -> str:
    """Return the mode of the process: what was set, else what MOEPACK_COMPUTE says, else "auto".

    Raises:
        ValueError: MOEPACK_COMPUTE is no mode.
    """
    return _chosen or _checked(os.environ.get(VARIABLE) or "auto")


def set_compute_mode(mode: str | None, model: nn.Module | None = None) -> None:
    """Choose how packed weights are multiplied.

    Args:
        mode: "auto", "exact", "bf16" or "int8"; None goes back to the default: of the process, or of a model the
            process's mode.
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
    """Return the mode in which a tensor multiplies: its module's or the process's; None where its format lacks that.

    Args:
        tensor: the weights.
        mode: what their module says, or None.
    """
    chosen = mode or compute_mode()
    return chosen if chosen in tensor.modes else None


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"the compute mode must be one of {', '.join(MODES)}, not {mode!r}")
    return mode
