"""Makes a model of many layers from one of a single layer, which every layer repeats.

    python -m benches.tools.stacked SOURCE OUT LAYERS

SOURCE is a packed directory or an ordinary checkpoint in safetensors, also an exported one. OUT has the same bytes for
every layer under other names, so a model as large as a real one is made in seconds, for measurements of speed and
memory only.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moepack.format.directory import read_manifest
from moepack.format.header import read_header
from moepack.format.manifest import FileRecord, Manifest
from moepack.format.shard import DTYPE_NAMES, Entry, WrittenShard, write_shard

CONFIG, INDEX, MANIFEST = "config.json", "model.safetensors.index.json", "moepack.json"
FIRST = "layers.0."


def named(text: str, layer: int) -> str:
    """The name of a layer's tensor or module, from that of the first layer."""
    return text.replace(FIRST, f"layers.{layer}.")


@dataclass(frozen=True)
class Source:
    """Tensors of the source.

    Attributes:
        layer: those of the layer.
        rest: all others.
        manifest: of a packed directory.
    """

    layer: list[Entry]
    rest: list[Entry]
    manifest: Manifest | None

    @classmethod
    def open(cls, directory: Path) -> Source:
        """Map the files of a directory."""
        manifest = read_manifest(directory) if (directory / MANIFEST).exists() else None
        packed = manifest.packed() if manifest else {}
        places = json.loads((directory / INDEX).read_text())["weight_map"]
        found = [entry for file in sorted({*places.values()}) for entry in entries(directory / file, packed)]
        return cls(
            [each for each in found if FIRST in each.name], [each for each in found if FIRST not in each.name], manifest
        )


def entries(file: Path, packed: Mapping[str, Any]) -> Iterator[Entry]:
    """The tensors of a mapped file."""
    data = np.memmap(file, np.uint8, "r")
    for name, info in read_header(file, ValueError).tensors.items():
        values = memoryview(data[info.offset : info.offset + info.nbytes])
        yield Entry(name, DTYPE_NAMES[info.dtype], info.shape, lambda values=values: values, name in packed)


def stack(directory: Path, out: Path, layers: int) -> None:
    """Write `out` with a number of layers."""
    source = Source.open(directory)
    out.mkdir(parents=True)
    names = {f"layer-{layer:03}.safetensors": layer for layer in range(layers)}
    shards = {"rest.safetensors": source.rest} | {
        file: [replace(entry, name=named(entry.name, layer)) for entry in source.layer] for file, layer in names.items()
    }
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda item: write_shard(out / item[0], item[1], {"format": "pt"}), shards.items())
        written = dict(zip(shards, found, strict=True))
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (directory / file).exists():
            shutil.copy(directory / file, out)
    places = {entry.name: file for file, of_file in shards.items() for entry in of_file}
    size = sum(entry.nbytes for of_file in shards.values() for entry in of_file)
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": places}))
    settings = json.loads((directory / CONFIG).read_text())
    (out / CONFIG).write_text(json.dumps(configuration(settings, layers), indent=1))
    if source.manifest:
        manifest = extended(source.manifest, out, written, places, layers)
        (out / MANIFEST).write_bytes(manifest.to_bytes())


def configuration(settings: dict[str, Any], layers: int) -> dict[str, Any]:
    """The configuration with a number of layers, also where it names the layer's modules."""
    quantization = settings.get("quantization_config", {})
    if "packed" in quantization:
        quantization["packed"] = repeated(quantization["packed"], layers)
    if "ignore" in quantization:
        quantization["ignore"] = [*repeated(dict.fromkeys(quantization["ignore"]), layers)]
    for group in quantization.get("config_groups", {}).values():
        plain = [target for target in group["targets"] if not target.startswith("re:")]
        patterns = [re.sub(r"layers\\\.0\\\.", r"layers\\.[0-9]+\\.", each) for each in group["targets"]]
        every = [target for target in patterns if target.startswith("re:")]
        group["targets"] = [*every, *repeated(dict.fromkeys(plain), layers)]
    if settings.get("layer_types"):
        settings["layer_types"] *= layers
    return settings | {"num_hidden_layers": layers}


def repeated(items: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Repeat the items of the first layer for every layer; keep the others."""
    found = {}
    for name, value in items.items():
        found |= {named(name, layer): value for layer in range(layers)} if FIRST in name else {name: value}
    return found


def extended(
    manifest: Manifest, out: Path, written: Mapping[str, WrittenShard], places: Mapping[str, str], layers: int
) -> Manifest:
    """The manifest of the packed directory `out`."""
    tensors = {}
    for layer in range(layers):
        for name, record in manifest.tensors.items():
            own = named(name, layer)
            tensors[own] = replace(record, file=places[own], module=named(record.module, layer))
    files = {name: FileRecord(shard.size, shard.sha256) for name, shard in written.items()}
    others = [file for file in out.iterdir() if file.suffix == ".json"]
    files |= {file.name: FileRecord.of(file.read_bytes()) for file in others}
    return replace(manifest, tensors=tensors, files=files)


if __name__ == "__main__":
    stack(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
