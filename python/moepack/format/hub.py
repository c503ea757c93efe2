"""Writes the Hugging Face files of a packed directory: config.json and the index of the shards.

`quantization_config` in config.json names moepack as the loader for transformers. It lists the packed modules with
their shapes, so that the loader can build the model before it reads a tensor.
"""

import json
from collections.abc import Mapping
from typing import Any

from moepack.format.manifest import VERSION, Manifest, TensorRecord

CONFIG = "config.json"
GENERATION = "generation_config.json"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""The configuration of a peft adapter. If it is present, transformers applies the adapter in the same directory."""
PREDICTORS = "predictors.safetensors"
"""Weights of the predictors for expert prefetching. They are not part of the model."""
BALANCE = "balance.safetensors"
"""Factors between the tensors of the directory and those of its source. They are not part of the model."""
QUANT_METHOD = "moepack"


def shard_name(number: int, count: int) -> str:
    """Return the name of shard `number` (from 1) of `count` in transformers' convention."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def quantization_config(
    method: str, settings: Mapping[str, Any], tensors: Mapping[str, TensorRecord]
) -> dict[str, Any]:
    """Return the `quantization_config` of config.json: method, settings, and the packed modules.

    `packed` maps the path of each experts module to its projections and their shapes [experts, rows, columns], and the
    path of each packed linear layer to {"weight": [rows, columns]}. It omits experts that the model does not have.
    """
    packed: dict[str, dict[str, list[int]]] = {}
    for record in tensors.values():
        if record.packed and not record.beyond:
            packed.setdefault(record.module, {})[record.projection] = list(record.shape)
    return {"quant_method": QUANT_METHOD, "version": VERSION, "method": method, **settings, "packed": packed}


def config_bytes(source: Mapping[str, Any], quantization: Mapping[str, Any]) -> bytes:
    """Return the bytes of config.json: the source's with `quantization_config` added."""
    return _dump({**source, "quantization_config": dict(quantization)})


def index_bytes(tensors: Mapping[str, TensorRecord]) -> bytes:
    """Return the bytes of the index, which maps tensors to shards."""
    total = sum(record.nbytes for record in tensors.values())
    weight_map = {name: record.file for name, record in tensors.items()}
    return _dump({"metadata": {"total_size": total}, "weight_map": weight_map})


def contradictions(manifest: Manifest, config: Mapping[str, Any], index: Mapping[str, Any]) -> dict[str, str]:
    """Compare config.json and the index with the manifest; return the errors by file name."""
    found = {}
    if config.get("quantization_config") != quantization_config(manifest.method, manifest.settings, manifest.tensors):
        found[CONFIG] = "quantization_config contradicts the manifest"
    if index.get("weight_map") != {name: record.file for name, record in manifest.tensors.items()}:
        found[INDEX] = "weight_map contradicts the manifest"
    return found


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
