"""Packed linear layers, which replace transformers' `nn.Linear`.

The bias remains a parameter, which the transformers loader fills like any other.
"""

from typing import Any

import torch
from torch import nn

from moepack.modules import gradients
from moepack.modules.ops import linear as traced_linear
from moepack.stores.module import PackedModule

__all__ = ["PackedLinear"]


class PackedLinear(PackedModule):
    """`y = x W^T + b` with a packed W, accumulated in float32 including the bias, then rounded once.

    The bytes are in the buffer `packed`. There is no `weight` tensor, because some models read the dtype of a layer's
    weight (T5 casts its activations to it) and would see uint8.

    Args:
        rows: output features.
        columns: input features.
        bias: `[rows]`, or None.
    """

    projections = ("packed",)
    weight: None = None
    divided: torch.Tensor | None = None
    """By what products are divided, [R], because outputs are in the scales of the model's source."""

    bias: nn.Parameter | None

    def __init__(self, rows: int, columns: int, bias: nn.Parameter | None = None) -> None:
        super().__init__({"packed": (1, rows, columns)})
        self.in_features, self.out_features = columns, rows
        self.register_parameter("bias", bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: `[..., columns]`, float32, bfloat16 or float16, on the device of a backend.

        Returns:
            `[..., rows]` in the dtype of `x`.
        """
        (rows,) = self.brought_home(x.reshape(-1, self.in_features))
        data = self.packed_bytes() if torch.compiler.is_compiling() else None
        if data is None:
            (matrix,) = self.store.fetch(self, None, rows.device)
            product = gradients.linear(matrix, rows, self.mode)
        else:
            product = traced_linear(rows, data[0], self.out_features, self.mode)
        product = product.to(x.device)
        if self.divided is not None:
            product = product / self.divided.to(x.device)
        if self.bias is not None:
            product = product + self.bias
        return product.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def enter_source_scales(self) -> None:
        """Take inputs and give outputs in the scales of the model's source, as `PackedModule.enter_source_scales`."""
        super().enter_source_scales()
        rows = self.scales("packed")[0]
        self.divided = None if rows is None else rows[0]

    def leave_source_scales(self) -> None:
        """Return to the scales of the packed model."""
        super().leave_source_scales()
        self.divided = None

    @property
    def W_q(self) -> torch.Tensor:
        """The packed bytes. By this attribute, peft recognizes layers whose weights `dequantize` returns."""
        return self.qweight

    def dequantize(self) -> torch.Tensor:
        """Decode the weights to `[rows, columns]` float32 on the module's device, in the scales of the source."""
        return self.restored("packed", self.values("packed"))[0].to(self.qweight.device)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if self.bias is not None and f"{prefix}bias" in state_dict:
            with torch.no_grad():
                self.bias.copy_(state_dict[f"{prefix}bias"])
