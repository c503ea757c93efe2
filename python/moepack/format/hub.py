"""The files that make a packed directory a Hugging Face model directory: config.json and the index of the shards.

`quantization_config` in config.json tells transformers who loads the experts, and the loader which modules are packed
with which shapes, so that it can lay out the model before it reads a tensor.
"""

import json
from collections.abc import Mapping
from typing import Any

from moepack.format.manifest import VERSION, Manifest, TensorRecord

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
"""The configuration of an adapter (peft); where it lies, transformers applies the adapter's weights beside it."""
PREDICTORS = "predictors.safetensors"
"""What guesses which experts a layer will choose; it belongs to no tensor of the model."""
QUANT_METHOD = "moepack"


def shard_name(number: int, count: int) -> str:
    """Return the name of shard `number` (from 1) of `count`, as transformers spells it."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def quantization_config(
    method: str, settings: Mapping[str, Any], tensors: Mapping[str, TensorRecord]
) -> dict[str, Any]:
    """Return config.json's `quantization_config`: method, settings, and the packed modules.

    `packed` maps the module path of each experts module to its projections and their shapes [experts, rows, columns],
    and the path of each packed linear layer to {"weight": [rows, columns]}; experts that the
    model does not have are not among them.
    """
    packed: dict[str, dict[str, list[int]]] = {}
    for record in tensors.values():
        if record.packed and not record.beyond:
            packed.setdefault(record.module, {})[record.projection] = list(record.shape)
    return {"quant_method": QUANT_METHOD, "version": VERSION, "method": method, **settings, "packed": packed}


def config_bytes(source: Mapping[str, Any], quantization: Mapping[str, Any]) -> bytes:
    """Return the text of config.json: the source's with `quantization_config` added."""
    return _dump({**source, "quantization_config": dict(quantization)})


def index_bytes(tensors: Mapping[str, TensorRecord]) -> bytes:
    """Return the text of the index: which shard holds which tensor."""
    total = sum(record.nbytes for record in tensors.values())
    weight_map = {name: record.file for name, record in tensors.items()}
    return _dump({"metadata": {"total_size": total}, "weight_map": weight_map})


def contradictions(manifest: Manifest, config: Mapping[str, Any], index: Mapping[str, Any]) -> dict[str, str]:
    """Compare config.json and the index with the manifest; return what is wrong by file name."""
    found = {}
    if config.get("quantization_config") != quantization_config(manifest.method, manifest.settings, manifest.tensors):
        found[CONFIG] = "quantization_config contradicts the manifest"
    if index.get("weight_map") != {name: record.file for name, record in manifest.tensors.items()}:
        found[INDEX] = "weight_map contradicts the manifest"
    return found


def _dump(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
