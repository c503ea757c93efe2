"""Loads a packed directory into a vLLM model: packed bytes for packed layers, decoded weights for all others.

Each rank reads its own part of the mapped files (`parts`). Decoded weights are bfloat16 under their checkpoint names,
as written by `moepack export --to bf16`, one tensor or one projection of a layer's experts at a time. vLLM's models
load them like any checkpoint. Tensors of layers that other ranks of a pipeline compute are not decoded, and layers for
multi-token prediction, which vLLM loads as a model of their own, get no other packed layers.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import is_pp_missing_parameter

from moepack.export.bf16 import plain_shards
from moepack.export.directory import dense_entries
from moepack.format.directory import PackedDirectory
from moepack.vllm.configuration import PackedConfig
from moepack.vllm.experts import PackedExpertsMethod
from moepack.vllm.linear import PackedLinearMethod
from moepack.vllm.parts import Part, Source, directory_of, values_of
from moepack.vllm.vocabulary import PackedVocabularyMethod

__all__ = ["PackedLoader"]

logger = init_logger("vllm.plugins.moepack")


class PackedLoader(BaseModelLoader):  # type: ignore[misc]
    """The load format `moepack`."""

    def download_model(self, model_config: Any) -> None:
        """Download the model from the Hub unless it is a directory. Errors as for `resolve_model`."""
        directory_of(model_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load the rank's weights of a model, on the device of its first parameter.

        Raises:
            LoadError, CorruptionError: the directory cannot be read, or has other shapes than the model.
            DeviceError, DeviceMemoryError: the device cannot hold the packed bytes.
        """
        directory = PackedDirectory.open(directory_of(model_config))
        entries = {entry.name: entry for shard in dense_entries(directory) for entry in shard}
        source = Source(directory, next(model.parameters()).device, entries)
        parts = _parts(model, directory)
        _load_vocabulary(model, parts, source)
        for layer in [*model.modules()]:
            method = getattr(layer, "quant_method", None)
            if isinstance(method, PackedLinearMethod | PackedExpertsMethod):
                method.load(layer, source)
        _report(source)
        elsewhere = {
            name
            for path, part in parts.items()
            if is_pp_missing_parameter(f"{path}.", model)
            for name in part.tensors.values()
        }
        if _predicts(model_config):
            elsewhere |= _of_layers(directory)
        model.load_weights(_weights(source, elsewhere))  # type: ignore[operator]


def _predicts(model_config: Any) -> bool:
    """Return whether a model consists of the layers of a checkpoint for multi-token prediction, as a speculator."""
    return str(getattr(model_config.hf_config, "model_type", "")).endswith("mtp")


def _of_layers(directory: PackedDirectory) -> set[str]:
    """Return the packed tensors of all layers but those for multi-token prediction."""
    packed = directory.manifest.packed()
    return {name for name, record in packed.items() if ".layers." in name and not record.beyond}


def _parts(model: nn.Module, directory: PackedDirectory) -> dict[str, Part]:
    """Return the packed modules of a directory by vLLM's paths."""
    config = PackedConfig()
    config.read(directory)
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        config.apply_vllm_mapper(mapper)
    return config.modules


def _load_vocabulary(model: nn.Module, parts: dict[str, Part], source: Source) -> None:
    """Load packed embeddings and heads. A head takes its embedding's bytes if vLLM tied their weights."""
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, VocabParallelEmbedding)}
    has_head = any(isinstance(layer, ParallelLMHead) for layer in layers.values())
    weights = {path: layer._parameters.get("weight") for path, layer in layers.items()}
    packed = {path: parts[path] for path in layers if path in parts}
    tied = {weights[path]: part for path, part in packed.items() if weights[path] is not None}
    for path, layer in layers.items():
        part = packed.get(path) or tied.get(weights[path])
        if part is not None:
            PackedVocabularyMethod(part).install(layer, source, has_head)


def _report(source: Source) -> None:
    """Log which tensors each rank holds in another way than vLLM splits them."""
    told = "moepack: %s, because their format cannot be cut there: %s"
    if source.whole:
        logger.info(told, f"every rank holds {len(source.whole)} tensors whole", ", ".join(sorted(source.whole)))
    if source.by_experts:
        share = f"ranks divide the experts of {len(source.by_experts)} tensors instead of their channels"
        logger.info(told, share, ", ".join(sorted(source.by_experts)))


def _weights(source: Source, elsewhere: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and values of the ordinary checkpoint's tensors, except those loaded already or on other ranks."""
    left_out = source.taken | elsewhere
    for shard in plain_shards(source.directory, left_out):
        for entry in shard():
            if entry.name not in left_out:
                yield entry.name, values_of(entry)
