"""Selects how packed weights are multiplied: exactly, rounded to bf16, with int8 activations, or automatically.

- *auto*, the default, computes few tokens per expert like *exact*, and many like *bf16* wherever that is faster.
  Tensors that were quantized for rounded activations round them. Up projections of 2 bits that select channels
  (docs/methods/floe.md) read 8-bit activations.
- *exact* computes with the precision of float32. Group-wise integers read activations as 24-bit integers, scaled for
  each token and group of columns.
- *bf16* rounds weights and activations to bfloat16 (2^-8 relative) for many tokens, like an unpacked bfloat16 model.
- *int8* quantizes activations to 8 bits. The error is at most 1/254 of the largest activation of the group, which can
  matter for models with activation outliers.

*exact* and *bf16* ignore the activation bits of tensors that were quantized for rounded activations.

A single token costs nearly the same in all modes, because reading the weights dominates (docs/performance.md).

The mode applies to the process; `moepack.load` can override it for one model. A format that does not support a mode
uses auto.
"""

import os

from torch import nn

from moepack.registry import OpenTensor

__all__ = ["MODES", "VARIABLE", "ComputingModule", "compute_mode", "product_mode", "set_compute_mode"]

MODES = ("auto", "exact", "bf16", "int8")
VARIABLE = "MOEPACK_COMPUTE"
"""The environment variable that sets the initial mode of the process."""

_chosen: str | None = None


class ComputingModule(nn.Module):
    """A module with packed weights.

    Attributes:
        mode: one of `MODES`; None uses the mode of the process.
    """

    mode: str | None = None


def compute_mode() -> str:
    """Return the mode of the process: the one set, else MOEPACK_COMPUTE, else "auto".

    Raises:
        ValueError: MOEPACK_COMPUTE is not a mode.
    """
    return _chosen or _checked(os.environ.get(VARIABLE) or "auto")


def set_compute_mode(mode: str | None, model: nn.Module | None = None) -> None:
    """Set how packed weights are multiplied.

    Args:
        mode: "auto", "exact", "bf16" or "int8"; None restores the default, which for a model is the mode of the
            process.
        model: set the mode of this model's packed layers; None sets the mode of the process.

    Raises:
        ValueError: the mode is unknown.
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
    """Return the mode for products with a tensor; None if its format does not support the selected mode.

    Args:
        tensor: the weights.
        mode: the mode of their module; None selects the mode of the process.
    """
    chosen = mode or compute_mode()
    return chosen if chosen in tensor.modes else None


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"the compute mode must be one of {', '.join(MODES)}, not {mode!r}")
    return mode
