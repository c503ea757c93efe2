"""Puts the values of a packed directory into transformers' own model, to measure it on devices without packed
kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model


class Dequantized:
    """One model in float32 on a device, whose weights are replaced repeatedly.

    Attributes:
        model: transformers' model.
    """

    def __init__(self, path: Path, device: str) -> None:
        self.model: Any = open_model(path, torch.float32).to(device)
        self._original = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    @torch.no_grad()
    def original(self) -> Any:
        """The model with its original weights."""
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(self._original[name])
        return self.model

    @torch.no_grad()
    def packed(self, directory: Path) -> Any:
        """The model with the packed values of `directory`."""
        self.original()
        opened = PackedDirectory.open(directory)
        for name, record in opened.manifest.packed().items():
            values = torch.from_numpy(opened.blob(name).dequantize())
            module = self.model.get_submodule(record.module)
            if not record.experts:
                module.weight.copy_(values[0])
            elif record.projection == "down_proj":
                module.down_proj.copy_(values)
            else:
                module.gate_up_proj.chunk(2, 1)[record.projection != "gate_proj"].copy_(values)
        return self.model
