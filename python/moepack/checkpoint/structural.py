"""Recognises the experts of architectures without a description, using transformers' model and loading rules.

The model is built from config.json on the meta device. Its modules show the location and form of the experts
(`experts`). Transformers' loading rules map the checkpoint's tensors to its parameters: renamings, and conversions that
stack, join, transpose or interleave the tensors of the experts. moepack therefore reads checkpoints in the same way as
transformers, and supports new architectures with a new transformers release.

Unknown conversions and module forms are rejected, because a wrong guess would silently pack the wrong numbers.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from moepack.checkpoint.architectures import ARCHITECTURES, STANDARD
from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.dense import FLOATS, DenseLayer, DenseLinear, position
from moepack.checkpoint.experts import ExpertsForm, Place, form_of, is_experts
from moepack.checkpoint.model import MoeLayer, MoeModel, Part, Projection
from moepack.checkpoint.names import Names, Source, UnknownConversion
from moepack.checkpoint.reader import Checkpoint
from moepack.checkpoint.unread import is_adapter
from moepack.errors import CheckpointError, UnsupportedModelError

__all__ = ["recognise", "unreadable"]


def unsupported(checkpoint: Checkpoint, reason: str) -> UnsupportedModelError:
    """Return the error for an architecture that moepack does not support."""
    return UnsupportedModelError(
        f"model type '{checkpoint.config['model_type']}' is not supported: {reason}. Supported are "
        f"{', '.join(sorted(ARCHITECTURES))}, and models whose experts transformers keeps in modules of its interface "
        "(`moepack models`)",
        file=checkpoint.path,
    )


def unreadable(checkpoint: Checkpoint, reason: str) -> UnsupportedModelError:
    """Return the error for a checkpoint that does not match the model of its config.json."""
    kind = checkpoint.config["model_type"]
    return UnsupportedModelError(f"cannot be read as a model of type '{kind}': {reason}", file=checkpoint.path)


def recognise(checkpoint: Checkpoint) -> MoeModel:
    """Describe a checkpoint using transformers' model. No tensor is read.

    Raises:
        UnsupportedModelError: the model cannot be built, has no experts, or has experts of an unknown form.
        CheckpointError: the tensors contradict the model.
    """
    model = _built(checkpoint)
    forms = _forms(checkpoint, model)
    names = Names(checkpoint, model)
    layers = tuple(_layer(checkpoint, names, path, *forms[path]) for path in sorted(forms, key=_order))
    consumed = {name for layer in layers for part in layer.projections for name in part.sources}
    unread = {
        name
        for path, (module, form) in forms.items()
        for name in _unread(checkpoint, names, path, module, form, consumed)
    }
    dense_names = tuple(name for name in checkpoint.names() if name not in consumed | unread)
    taken = consumed | {name for layer in layers for name in layer.router}
    architecture = checkpoint.config["model_type"]
    notes = (f"'{architecture}' has no description of its own; its experts were recognised by structure.",)
    dense = _dense(checkpoint, names, model, [*forms], taken)
    return MoeModel(architecture, layers, dense_names, notes, dense, unread=names.unread)


def _order(path: str) -> tuple[Any, ...]:
    """Return a sort key for the order of execution. Experts of the attention come first in a block."""
    return (*position(path), "attention" not in path)


def _built(checkpoint: Checkpoint) -> Any:
    """Build the model of config.json on the meta device."""
    config = checkpoint.config
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        layers = part.get("num_hidden_layers", 0)
        if not isinstance(layers, int) or layers > len(checkpoint):
            raise unreadable(
                checkpoint, f"config.json declares {layers} layers, but the checkpoint has {len(checkpoint)} tensors"
            )
    try:
        return meta_model(checkpoint.path, config)
    except UnsupportedModelError as cause:
        raise unsupported(checkpoint, cause.detail) from cause
    except Exception as cause:
        raise unreadable(checkpoint, f"transformers cannot build it from config.json ({cause})") from cause


def _forms(checkpoint: Checkpoint, model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, ExpertsForm]]:
    """Return the experts modules of the model and their forms, by path."""
    found: dict[str, tuple[torch.nn.Module, ExpertsForm]] = {}
    for path, module in model.named_modules():
        if not is_experts(path, module) or any(path.startswith(f"{outer}.") for outer in found):
            continue
        form = form_of(module)
        if form is None and any(is_experts("", inner) for inner in list(module.modules())[1:]):
            continue
        if form is None:
            raise unsupported(
                checkpoint, f"{path} ({type(module).__name__}) holds experts in a form that moepack does not know"
            )
        found[path] = module, form
    if not found:
        raise unsupported(checkpoint, "the model has no experts")
    return found


def _layer(checkpoint: Checkpoint, names: Names, path: str, module: torch.nn.Module, form: ExpertsForm) -> MoeLayer:
    """Describe the experts of a module, after checking them against the checkpoint."""
    projections = []
    for name, shape in form.shapes.items():
        place = form.places[name]
        parameter = module.get_parameter(place.parameter)
        try:
            source = names.source(f"{path}.{place.parameter}", tuple(parameter.shape), shape[0])
        except UnknownConversion as cause:
            raise unsupported(checkpoint, str(cause)) from cause
        parts = tuple(_parts(checkpoint, source, name, place, shape))
        _check(checkpoint, path, parts, shape)
        projections.append(Projection(name, shape, f"{path}.{form.packed_name(name)}", parts, checkpoint))
    block = path.rpartition(".")[0]
    beside = {name: parameter.removeprefix(f"{block}.") for parameter, name in names.below(block)}
    router = tuple(name for name, rest in beside.items() if rest.startswith(STANDARD.router))
    shared = tuple(name for name, rest in beside.items() if rest.startswith(STANDARD.shared))
    kind = "gated" if form.kind in ("identity", "every") else form.kind
    return MoeLayer(path, tuple(projections), router, shared, kind)


def _unread(
    checkpoint: Checkpoint, names: Names, path: str, module: torch.nn.Module, form: ExpertsForm, consumed: set[str]
) -> Iterator[str]:
    """Yield tensors that are never read: matrices beyond the last expert, whose indices return the token unchanged.

    Raises:
        CheckpointError: the experts contain another tensor that is not a parameter of the module.
    """
    kept = {f"{path}.{name}" for name in module.state_dict() if name not in form.parameters}
    for parameter, name in names.below(path):
        if name in consumed or parameter in kept or is_adapter(name):
            continue
        if form.kind != "identity":
            message = "is stored with the experts, but is not one of their matrices"
            raise CheckpointError(message, file=checkpoint.info(name).file, tensor=name)
        yield name


def _parts(
    checkpoint: Checkpoint, source: Source, name: str, place: Place, shape: tuple[int, int, int]
) -> Iterator[Part]:
    """Yield the place of a projection's matrix for each expert."""
    rows, inner = place.rows, shape[1]
    if len(source.pieces) == 2:
        if place.transposed:
            raise unsupported(checkpoint, f"its transposed experts are joined from several tensors ({name})")
        yield from source.pieces[0 if name == "gate_proj" else 1][: shape[0]]
        return
    if source.interleaved is not None and rows != slice(None):
        first = name == "gate_proj"
        rows = (
            slice(int(not first), None, 2) if source.interleaved else slice(0, inner) if first else slice(inner, None)
        )
    for part in source.pieces[0][: shape[0]]:
        transposed = part.transposed != place.transposed
        share = () if rows == slice(None) else (slice(None), rows) if transposed else (rows,)
        yield replace(part, index=(*part.index, *share), transposed=transposed)


def _check(checkpoint: Checkpoint, path: str, parts: tuple[Part, ...], shape: tuple[int, int, int]) -> None:
    """Check that every matrix has the model's shape and a floating-point dtype."""
    for part in parts:
        info = checkpoint.info(part.tensor)
        if info.dtype not in FLOATS:
            message = (
                f"is stored as {str(info.dtype).removeprefix('torch.')}: quantized, but config.json does not say how"
            )
            raise UnsupportedModelError(message, file=info.file, tensor=part.tensor)
        try:
            found = tuple(part.of(torch.empty(info.shape, device="meta")).shape)
        except (IndexError, RuntimeError):
            found = info.shape
        if found != shape[1:]:
            message = f"an expert of {path} has shape {list(found)}, but config.json expects {list(shape[1:])}"
            raise unreadable(checkpoint, f"{message} ({part.tensor})")


def _dense(
    checkpoint: Checkpoint, names: Names, model: torch.nn.Module, experts: list[str], taken: set[str]
) -> tuple[DenseLayer, ...]:
    """Return the linear layers of the stacks that have experts, and the head."""
    stacks = "|".join({re.escape(path) for name in experts for path in re.findall(r"^(.+?)\.\d+\.", name)})
    patterns = {}
    for role, linears in STANDARD.dense.items():
        leaves = "|".join((*linears.reads, *linears.inner, *linears.writes))
        patterns[role] = re.compile(rf"(?P<layer>(?:{stacks})\.\d+)\.{linears.path}\.(?:{leaves})\.weight")
    modules = dict(model.named_modules())
    found: dict[str, list[DenseLinear]] = {}
    for parameter, source in names.plain.items():
        path, info = parameter.removesuffix(".weight"), checkpoint.info(source)
        matched = {role: match for role, pattern in patterns.items() if (match := pattern.fullmatch(parameter))}
        if parameter == STANDARD.head and not checkpoint.config.get("tie_word_embeddings"):
            role, layer = "head", path
        elif matched:
            role = next(iter(matched))
            layer = matched[role]["layer"]
        else:
            continue
        if source in taken or info.dtype not in FLOATS or type(modules.get(path)) is not torch.nn.Linear:
            continue
        linear = DenseLinear(path, role, (info.shape[0], info.shape[1]), source, checkpoint)
        found.setdefault(layer, []).append(linear)
    roles = [*STANDARD.dense, "head"]
    return tuple(
        DenseLayer(layer, tuple(sorted(found[layer], key=lambda linear: roles.index(linear.role))))
        for layer in sorted(found, key=position)
    )
