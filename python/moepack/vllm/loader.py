"""Loads a packed directory into a vLLM model: packed bytes for packed layers, decoded weights for all others.

Decoded weights are bfloat16 under their checkpoint names, as written by `moepack export --to bf16`, one tensor or one
projection of a layer's experts at a time. vLLM's models load them like any checkpoint.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from moepack.checkpoint.resolve import resolve_model
from moepack.export.bf16 import plain_shards
from moepack.format.directory import PackedDirectory
from moepack.format.header import DTYPES
from moepack.stores.mapped import MappedStore
from moepack.stores.uploaded import DeviceStore
from moepack.vllm.methods import PackedExpertsMethod, PackedLinearMethod

__all__ = ["PackedLoader"]


class PackedLoader(BaseModelLoader):  # type: ignore[misc]
    """The load format `moepack`."""

    def download_model(self, model_config: Any) -> None:
        """Download the model from the Hub unless it is a directory. Errors as for `resolve_model`."""
        resolve_model(_name(model_config))

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load the weights of a model, on the device of its first parameter.

        Raises:
            LoadError, CorruptionError: the directory cannot be read.
            DeviceError, DeviceMemoryError: the device cannot hold the packed bytes.
        """
        source = PackedDirectory.open(resolve_model(_name(model_config)))
        device = next(model.parameters()).device
        store = MappedStore() if device.type == "cpu" else DeviceStore(device)
        taken = set()
        for layer in [*model.modules()]:
            method = getattr(layer, "quant_method", None)
            if isinstance(method, PackedLinearMethod | PackedExpertsMethod):
                for module, projection, name in method.packed(layer):
                    file = source.path / source.manifest.tensors[name].file
                    store.put(module, projection, source.tensor(name), file=file, tensor=name)
                    taken.add(name)
        model.load_weights(_weights(source, taken))  # type: ignore[operator]


def _name(model_config: Any) -> str:
    revision = getattr(model_config, "revision", None)
    return model_config.model if revision is None else f"{model_config.model}@{revision}"


def _weights(source: PackedDirectory, taken: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and values of all tensors of the ordinary checkpoint, except those loaded packed (`taken`)."""
    for shard in plain_shards(source, taken):
        for entry in shard():
            data = torch.frombuffer(bytearray(entry.data()), dtype=DTYPES[entry.dtype])
            yield entry.name, data.view(entry.shape)
