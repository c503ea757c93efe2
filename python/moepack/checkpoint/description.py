"""Identifies the experts, routers and linear layers of a checkpoint, using the architecture's description.

Layers are found by name. The result is checked against config.json and for consistency, so that no expert is missed or
misidentified:

* a block with a router has experts, and a block with experts has a router;
* the experts are exactly 0 .. E-1 with E from config.json, their shapes agree, gate and up have the transposed shape of
  down;
* the experts contain no other tensors (a bias, an extra expert);
* the weights are floating-point numbers of 16 bits or more, and the checkpoint declares no quantization.

Architectures without a description are recognised by structure if that is safe (see `structural`).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from moepack.checkpoint.architectures import ARCHITECTURES, STANDARD, Architecture, Layout
from moepack.checkpoint.beyond import find_beyond
from moepack.checkpoint.dense import FLOATS, DenseLayer, find_dense, position
from moepack.checkpoint.headed import is_headless
from moepack.checkpoint.model import MoeLayer, MoeModel, Part, Projection
from moepack.checkpoint.names import nearest
from moepack.checkpoint.reader import Checkpoint
from moepack.checkpoint.structural import recognise, unreadable
from moepack.checkpoint.unread import find_unread, is_adapter, unread_notes
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.plausible import check_config

__all__ = ["describe"]


def describe(checkpoint: Checkpoint) -> MoeModel:
    """Identify the experts, routers, shared experts and dense tensors of a checkpoint. No tensor is read.

    Raises:
        UnsupportedModelError: the architecture is unknown or not a mixture of experts, or the weights are quantized.
        CheckpointError: the tensors contradict config.json or each other.
    """
    _refuse_quantized(checkpoint)
    architecture = ARCHITECTURES.get(checkpoint.config["model_type"])
    if architecture is None:
        model = recognise(checkpoint)
    else:
        model = _read(checkpoint, architecture, _expert_count(checkpoint, architecture))
        _check_layers(checkpoint, architecture)
        unread = find_unread(checkpoint)
        model = replace(model, unread=unread, dense=tuple(_only_read(model.dense, unread)))
    notes = (*model.notes, *unread_notes(checkpoint, model.unread), *checkpoint.notes)
    _check_config(checkpoint, (architecture or STANDARD).top_k(checkpoint.config), model.layers[0].experts)
    return replace(model, notes=notes, beyond=tuple(find_beyond(checkpoint, model.dense_names)))


def _only_read(layers: Iterable[DenseLayer], unread: tuple[str, ...]) -> Iterator[DenseLayer]:
    """Yield the layers without the linear layers that the model does not have."""
    names = frozenset(unread)
    for layer in layers:
        if linears := tuple(linear for linear in layer.linears if linear.source not in names):
            yield DenseLayer(layer.name, linears)


def _check_config(checkpoint: Checkpoint, top_k: int, experts: int) -> None:
    """Reject a configuration with sizes that the tensors cannot fill, or with an invalid top-k."""
    names, file = checkpoint.names(), checkpoint.path / "config.json"
    nbytes = sum(checkpoint.info(name).nbytes for name in names)
    check_config(checkpoint.config, len(names), nbytes, file, CheckpointError)
    if not 1 <= top_k <= experts:
        raise CheckpointError(f"top-k is {top_k}, but a layer has {experts} experts", file=file)


def _read(checkpoint: Checkpoint, architecture: Architecture, experts: int) -> MoeModel:
    """Describe a checkpoint whose names follow `architecture`; each sparse layer has `experts`.

    Raises:
        UnsupportedModelError: no layer has experts, or their dtype is not supported.
        CheckpointError: the tensors contradict config.json or each other.
    """
    layers: dict[str, MoeLayer] = {}
    renamed: dict[str, str] = {}
    for block, number, rests in _blocks(checkpoint, architecture):
        if number >= _layer_count(checkpoint, architecture):
            continue  # multi-token prediction, after the model's last layer
        layer = _read_layer(checkpoint, architecture, block, rests, experts)
        if layer.name in layers:
            raise CheckpointError("the layer is stored twice, under two names", file=checkpoint.path, tensor=layer.name)
        layers[layer.name] = layer
        renamed[block] = layer.name.removesuffix(".experts")
    if not layers:
        raise unreadable(checkpoint, _nothing_found(checkpoint, architecture))
    consumed = {name for layer in layers.values() for part in layer.projections for name in part.sources}
    names = tuple(name for name in checkpoint.names() if name not in consumed)
    routers = {name for layer in layers.values() for name in layer.router}
    count = _layer_count(checkpoint, architecture)
    dense = find_dense(checkpoint, architecture, count, frozenset(consumed | routers), renamed)
    return MoeModel(checkpoint.config["model_type"], tuple(layers.values()), names, dense=dense)


def _nothing_found(checkpoint: Checkpoint, architecture: Architecture) -> str:
    """Return the error message for a checkpoint without experts: the names sought, the nearest found, and advice."""
    stack = next(iter(architecture.stacks))
    sought = " or ".join(f"{stack}.0.*.{layout.first}" for layout in architecture.layouts)
    names = checkpoint.names()
    found = next((name for name in names if "experts" in name), names[0] if names else "no tensor")
    classes = checkpoint.config.get("architectures")
    advice = "save the model with `save_pretrained` of its class, without training wrappers"
    if is_headless(classes):
        advice = f"config.json names {classes[0]}, a model without head; save the whole model"
    return f"no layer with experts was found: no tensor matches {sought}; the nearest is {found}; {advice}"


def _check_layers(checkpoint: Checkpoint, architecture: Architecture) -> None:
    """Check that every layer declared in config.json has a tensor. Otherwise the checkpoint is incomplete."""
    for stack, key in architecture.stacks.items():
        rests = (name.removeprefix(f"{stack}.") for name in checkpoint.names() if name.startswith(f"{stack}."))
        found = {rest.partition(".")[0] for rest in rests}
        count = checkpoint.config.get(key)
        missing = next((i for i in range(count) if str(i) not in found), None) if isinstance(count, int) else None
        if missing is not None:
            hint = next(
                (f"; the checkpoint has '{name}'" for name in checkpoint.names() if f".{stack}.{missing}." in name), ""
            )
            message = f"config.json declares {count} layers ({key}), but {stack}.{missing} has no tensor{hint}"
            raise CheckpointError(message, file=checkpoint.path)


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    """Reject a checkpoint that declares a quantization, because it holds codes and not weights."""
    quantization = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config")
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    how = f"quant_method '{method}'" if method else "by a method that config.json does not name"
    reason = "already packed by moepack" if method == "moepack" else f"already quantized ({how})"
    raise UnsupportedModelError(
        f"the checkpoint is {reason}; start from the f32, f16 or bf16 weights", file=checkpoint.path / "config.json"
    )


def _blocks(checkpoint: Checkpoint, architecture: Architecture) -> Iterator[tuple[str, int, list[str]]]:
    """Yield the sparse blocks in the order of execution: path, layer number, names below the path."""
    pattern = re.compile(rf"(?P<block>{architecture.layer}\.{architecture.block})\.(?P<rest>.+)")
    found: dict[str, tuple[int, list[str]]] = {}
    for name in checkpoint.names():
        if match := pattern.fullmatch(name):
            found.setdefault(match["block"], (int(match["number"]), []))[1].append(match["rest"])
    signs = (*architecture.expert_names, *architecture.router)
    for block in sorted(found, key=position):
        number, rests = found[block]
        if any(rest.startswith(signs) for rest in rests):
            yield block, number, rests


def _layer_count(checkpoint: Checkpoint, architecture: Architecture) -> int:
    """Return the number of layers of the longest stack: a decoder may be longer than its encoder."""
    return max(_sizes(checkpoint, "layers", tuple(architecture.stacks.values())).values())


def _expert_count(checkpoint: Checkpoint, architecture: Architecture) -> int:
    counts = _sizes(checkpoint, "experts", architecture.expert_keys)
    if len(set(counts.values())) > 1 or min(counts.values()) < 1:
        raise CheckpointError(f"contradictory numbers of experts: {counts}", file=checkpoint.path / "config.json")
    return next(iter(counts.values()))


def _sizes(checkpoint: Checkpoint, what: str, keys: tuple[str, ...]) -> dict[str, int]:
    """Return the values of `keys` that config.json holds as integers; raise if there is none."""
    sizes = {key: checkpoint.config[key] for key in keys if isinstance(checkpoint.config.get(key), int)}
    if not sizes:
        message = f"has no valid number of {what} ({', '.join(keys)})"
        raise CheckpointError(message, file=checkpoint.path / "config.json")
    return sizes


def _read_layer(
    checkpoint: Checkpoint, architecture: Architecture, block: str, rests: list[str], experts: int
) -> MoeLayer:
    """Describe the sparse block at `block`, with the tensor names `rests` below it."""
    layout = _layout(checkpoint, architecture, block, rests)
    if not layout.stacked and experts > len(rests):
        message = f"config.json declares {experts} experts, but the block has only {len(rests)} tensors"
        raise CheckpointError(message, file=checkpoint.path, tensor=block)
    parts = _parts(checkpoint, layout, block, experts)
    module = f"{block.rpartition('.')[0]}.{architecture.module}.experts"
    projections = tuple(
        Projection(name, _shape(checkpoint, found), f"{module}.{architecture.packed.format(name)}", found, checkpoint)
        for name, found in parts.items()
    )
    _check_shapes(checkpoint, block, projections)
    sources = {source for projection in projections for source in projection.sources}
    for rest in rests:
        if is_adapter(rest):
            continue
        if rest.startswith(architecture.expert_names) and f"{block}.{rest}" not in sources:
            raise CheckpointError(
                f"is stored with the experts, but is not a matrix of the {experts} experts that config.json declares",
                file=checkpoint.info(f"{block}.{rest}").file,
                tensor=f"{block}.{rest}",
            )
    router = tuple(f"{block}.{rest}" for rest in rests if rest.startswith(architecture.router))
    if not router:
        raise CheckpointError("the block has experts but no router", file=checkpoint.path, tensor=block)
    shared = tuple(f"{block}.{rest}" for rest in rests if rest.startswith(architecture.shared))
    kind = "gated" if len(projections) == 3 else "plain"
    return MoeLayer(module, projections, router, shared, kind)


def _layout(checkpoint: Checkpoint, architecture: Architecture, block: str, rests: list[str]) -> Layout:
    """Return the layout whose first tensor the block has."""
    layouts = [layout for layout in architecture.layouts if layout.first in rests]
    if len(layouts) != 1:
        wanted = [f"{block}.{layout.first}" for layout in architecture.layouts]
        hint = next(filter(None, (nearest(name, checkpoint.names()) for name in wanted)), "")
        found = "several" if layouts else f"none{hint}"
        raise CheckpointError(f"expected one of {', '.join(wanted)}; found {found}", file=checkpoint.path, tensor=block)
    return layouts[0]


def _parts(checkpoint: Checkpoint, layout: Layout, block: str, experts: int) -> dict[str, tuple[Part, ...]]:
    """Return the places of a block's experts, by projection."""
    parts: dict[str, tuple[Part, ...]] = {}
    for template, projections in layout.tensors.items():
        name, count = f"{block}.{template}", len(projections)
        rows = _stacked_rows(checkpoint, name, experts) if layout.stacked else 0
        for i, projection in enumerate(projections):
            if not layout.stacked:
                parts[projection] = tuple(Part(name.format(expert)) for expert in range(experts))
            else:
                share = () if count == 1 else (slice(rows * i // count, rows * (i + 1) // count),)
                parts[projection] = tuple(Part(name, (expert, *share)) for expert in range(experts))
    return parts


def _stacked_rows(checkpoint: Checkpoint, name: str, experts: int) -> int:
    """Return the rows of each matrix of a stacked tensor, after checking its number of experts."""
    info = checkpoint.info(name)
    if len(info.shape) != 3 or info.shape[0] != experts:
        raise CheckpointError(
            f"has shape {list(info.shape)}, but {experts} stacked matrices are expected", file=info.file, tensor=name
        )
    return info.shape[1]


def _shape(checkpoint: Checkpoint, parts: tuple[Part, ...]) -> tuple[int, int, int]:
    """Return (experts, rows, columns), after checking that all experts have one shape and a floating-point dtype."""
    shapes = [_matrix_shape(checkpoint, part) for part in parts]
    for part, shape in zip(parts, shapes, strict=True):
        if shape != shapes[0]:
            raise CheckpointError(
                f"has shape {list(shape)}, but the first expert has {list(shapes[0])}",
                file=checkpoint.info(part.tensor).file,
                tensor=part.tensor,
            )
    return len(parts), *shapes[0]


def _matrix_shape(checkpoint: Checkpoint, part: Part) -> tuple[int, int]:
    info = checkpoint.info(part.tensor)
    if info.dtype not in FLOATS:
        raise UnsupportedModelError(
            f"is stored as {str(info.dtype).removeprefix('torch.')}, already quantized; start from the f32, f16 or "
            "bf16 weights",
            file=info.file,
            tensor=part.tensor,
        )
    if len(info.shape) != 2 + sum(isinstance(index, int) for index in part.index):
        raise CheckpointError(
            f"has shape {list(info.shape)}, but a matrix is expected", file=info.file, tensor=part.tensor
        )
    rows, columns = part.of(torch.empty(info.shape, device="meta")).shape
    return rows, columns


def _check_shapes(checkpoint: Checkpoint, block: str, projections: tuple[Projection, ...]) -> None:
    """Check that the last projection has the transposed shape of all others."""
    _, rows, columns = projections[0].shape
    expected = [(rows, columns)] * (len(projections) - 1) + [(columns, rows)]
    if [projection.shape[1:] for projection in projections] != expected:
        shapes: dict[str, Any] = {projection.name: list(projection.shape) for projection in projections}
        message = (
            f"the shapes of the projections are inconsistent: {shapes}; the last must be the transpose of the others"
        )
        raise CheckpointError(message, file=checkpoint.path, tensor=block)
