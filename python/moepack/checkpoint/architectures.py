"""Which tensors of a checkpoint are experts: a table of families, and one reading of it.

A family says how its sparse blocks are called on disk and in transformers 5, and in which layouts their experts may be
stored. The layers are found by name; what is found is then held against config.json and against itself, so that an
expert can be neither forgotten nor taken for something else:

* a block with a router has experts, a block with experts has a router;
* the experts are exactly 0 .. E-1 with E from config.json, their shapes agree, gate and up are the transpose of down;
* nothing else lies among the experts (a bias, an expert too many);
* the weights are floating-point numbers of 16 bits or more, and the checkpoint declares no quantization.

Architectures outside the table are recognised by `structural` where that is safe.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moepack.checkpoint.dense import DenseLayer, find_dense
from moepack.checkpoint.model import MoeLayer, MoeModel, Part, Projection
from moepack.checkpoint.reader import Checkpoint
from moepack.errors import CheckpointError, UnsupportedModelError

__all__ = ["FAMILIES", "Family", "describe", "read_family", "refusal"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_LAYER_COUNTS = ("num_hidden_layers",)
_SEQ2SEQ_LAYER_COUNTS = ("num_layers", "num_decoder_layers")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class PerExpert:
    """One tensor for each expert and projection; `names` maps a projection to its name below the block."""

    names: Mapping[str, str]

    def first(self) -> str:
        """A name that a block of this layout has."""
        return next(iter(self.names.values())).format(0)

    def parts(self, block: str, experts: int, rows: int) -> dict[str, tuple[Part, ...]]:
        """Where the experts of a block lie."""
        return {
            projection: tuple(Part(f"{block}.{name.format(expert)}") for expert in range(experts))
            for projection, name in self.names.items()
        }


@dataclass(frozen=True, slots=True)
class Stacked:
    """Two tensors for all experts: gate above up, `[E, 2R, C]`, and down, `[E, C, R]`."""

    gate_up: str
    down: str

    def first(self) -> str:
        """A name that a block of this layout has."""
        return self.gate_up

    def parts(self, block: str, experts: int, rows: int) -> dict[str, tuple[Part, ...]]:
        """Where the experts of a block lie; `rows` is the height of the joint tensor, 2R."""
        gate_up, down, half = f"{block}.{self.gate_up}", f"{block}.{self.down}", rows // 2
        return {
            "gate_proj": tuple(Part(gate_up, expert, (0, half)) for expert in range(experts)),
            "up_proj": tuple(Part(gate_up, expert, (half, rows)) for expert in range(experts)),
            "down_proj": tuple(Part(down, expert) for expert in range(experts)),
        }


Layout = PerExpert | Stacked

_W123 = PerExpert(
    {
        "gate_proj": "experts.{}.w1.weight",
        "up_proj": "experts.{}.w3.weight",
        "down_proj": "experts.{}.w2.weight",
    }
)
_GATE_UP_DOWN = PerExpert(
    {name: f"experts.{{}}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")},
)
_FUSED = Stacked("experts.gate_up_proj", "experts.down_proj")
_GRANITE = Stacked("input_linear.weight", "output_linear.weight")
_WI_WO = PerExpert({"wi": "experts.expert_{}.wi.weight", "wo": "experts.expert_{}.wo.weight"})


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one family name their sparse blocks.

    Attributes:
        block: pattern of a sparse block's path on disk; its group `layer` is the layer's number.
        module: last component of that path in transformers' model.
        layouts: how the experts may be stored.
        router: beginnings of the router's names below the block.
        shared: beginnings of the shared experts' names below the block.
        packed: the packed tensor's name below the experts module, with the projection's name filled in. Stock
            transformers knows that name with another shape, so that loading without moepack fails instead of guessing.
    """

    block: str
    module: str
    layouts: tuple[Layout, ...]
    router: tuple[str, ...] = ("gate.",)
    shared: tuple[str, ...] = ()
    packed: str = "{}"


_MLP = r"model\.layers\.(?P<layer>\d+)\.mlp"
_MLP_RENAMED = r"model\.layers\.(?P<layer>\d+)\.(?:block_sparse_moe|mlp)"
_BLOCK_SPARSE_MOE = r"model\.layers\.(?P<layer>\d+)\.block_sparse_moe"
_SWITCH = r"(?:encoder|decoder)\.block\.(?P<layer>\d+)\.layer\.\d+\.mlp"

FAMILIES: Mapping[str, Family] = {
    "mixtral": Family(_MLP_RENAMED, "mlp", (_W123, _FUSED)),
    "phimoe": Family(_MLP_RENAMED, "mlp", (_W123, _FUSED), router=("gate.", "router.")),
    "qwen2_moe": Family(_MLP, "mlp", (_GATE_UP_DOWN, _FUSED), shared=("shared_expert.", "shared_expert_gate.")),
    "qwen3_moe": Family(_MLP, "mlp", (_GATE_UP_DOWN, _FUSED)),
    "olmoe": Family(_MLP, "mlp", (_GATE_UP_DOWN, _FUSED)),
    "deepseek_v2": Family(_MLP, "mlp", (_GATE_UP_DOWN, _FUSED), shared=("shared_experts.",)),
    "deepseek_v3": Family(_MLP, "mlp", (_GATE_UP_DOWN, _FUSED), shared=("shared_experts.",)),
    "granitemoe": Family(_BLOCK_SPARSE_MOE, "block_sparse_moe", (_GRANITE, _FUSED), router=("router.",)),
    "switch_transformers": Family(_SWITCH, "mlp", (_WI_WO,), router=("router.",), packed="expert_0.{}.weight"),
}
"""The supported architectures, by transformers' model type."""

STANDARD = Family(
    r"model\.(?:language_model\.)?layers\.(?P<layer>\d+)\.(?:mlp|block_sparse_moe|feed_forward)",
    "mlp",
    (_W123, _GATE_UP_DOWN, _FUSED, _GRANITE),
    router=("gate.", "router."),
    shared=("shared_",),
)
"""The names that architectures outside the table are searched for."""


def describe(checkpoint: Checkpoint) -> MoeModel:
    """Name the experts, routers, shared experts and dense tensors of a checkpoint. No tensor is read.

    Raises:
        UnsupportedModelError: the architecture is unknown or not a mixture of experts, or the weights are quantized.
        CheckpointError: the tensors contradict config.json or each other.
    """
    _refuse_quantized(checkpoint)
    family = FAMILIES.get(checkpoint.config["model_type"])
    if family is not None:
        model = read_family(checkpoint, family)
        _check_layers(checkpoint)
        return model
    from moepack.checkpoint.structural import recognise

    return recognise(checkpoint)


def refusal(checkpoint: Checkpoint, reason: str) -> UnsupportedModelError:
    """The error for a model that no adapter reads; it lists those that are read."""
    return UnsupportedModelError(
        f"model type '{checkpoint.config['model_type']}' is not supported: {reason}. "
        f"Supported are {', '.join(sorted(FAMILIES))}, and models whose experts transformers keeps in its standard "
        "layout",
        file=checkpoint.path,
    )


def read_family(checkpoint: Checkpoint, family: Family, experts: int | None = None) -> MoeModel:
    """Describe a checkpoint whose names follow `family`; each layer has `experts`, by default as config.json says.

    Raises:
        UnsupportedModelError: no layer has experts, or their dtype is not supported.
        CheckpointError: the tensors contradict config.json or each other.
    """
    layers: dict[str, MoeLayer] = {}
    renamed: dict[str, str] = {}
    notes: list[str] = []
    experts = _expert_count(checkpoint) if experts is None else experts
    for block, layer_index, rests in _blocks(checkpoint, family):
        if layer_index >= _layer_count(checkpoint):
            notes.append(f"{block} lies behind the model's last layer (multi-token prediction) and is kept as it is.")
            continue
        layer = _read_layer(checkpoint, family, block, rests, experts)
        if layer.name in layers:
            raise CheckpointError("the layer is stored twice, under two names", file=checkpoint.path, tensor=layer.name)
        layers[layer.name] = layer
        renamed[block] = layer.name.removesuffix(".experts")
    if not layers:
        raise refusal(checkpoint, "no layer with experts was found under the names of a causal or seq2seq model")
    consumed = {name for layer in layers.values() for part in layer.projections for name in part.sources}
    dense = tuple(name for name in checkpoint.names() if name not in consumed)
    linears = _dense_layers(checkpoint, layers.values(), renamed)
    return MoeModel(checkpoint.config["model_type"], tuple(layers.values()), dense, tuple(notes), linears)


def _check_layers(checkpoint: Checkpoint) -> None:
    """Every layer that config.json declares has a tensor: a checkpoint with less was not copied whole."""
    stacks = {"model.layers.": "num_hidden_layers"}
    if checkpoint.config.get("is_encoder_decoder"):
        stacks = {"encoder.block.": "num_layers", "decoder.block.": "num_decoder_layers"}
    for stack, key in stacks.items():
        rests = (name.removeprefix(stack) for name in checkpoint.names() if name.startswith(stack))
        found = {rest.partition(".")[0] for rest in rests}
        count = checkpoint.config.get(key)
        missing = next((i for i in range(count) if str(i) not in found), None) if isinstance(count, int) else None
        if missing is not None:
            message = f"{count} layers are configured ({key}), {stack}{missing} has no tensor"
            raise CheckpointError(message, file=checkpoint.path)


def _dense_layers(
    checkpoint: Checkpoint, layers: Iterable[MoeLayer], renamed: Mapping[str, str]
) -> tuple[DenseLayer, ...]:
    """The linear layers outside the experts; a head that is tied to the embeddings stays out."""
    taken = {name for layer in layers for part in layer.projections for name in part.sources}
    taken |= {name for layer in layers for name in layer.router}
    if checkpoint.config.get("tie_word_embeddings"):
        taken.add("lm_head.weight")
    return find_dense(checkpoint, _layer_count(checkpoint), frozenset(taken), renamed)


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    """A checkpoint that declares a quantization holds codes, not weights."""
    quantization = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config")
    if quantization is None:
        return
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else "unknown"
    reason = "already packed by moepack" if method == "moepack" else f"already quantized (quant_method '{method}')"
    raise UnsupportedModelError(
        f"the checkpoint is {reason}; start from the f32, f16 or bf16 weights", file=checkpoint.path / "config.json"
    )


def _blocks(checkpoint: Checkpoint, family: Family) -> Iterator[tuple[str, int, list[str]]]:
    """The sparse blocks in the order of execution: path, number of the layer, names below the path."""
    pattern = re.compile(rf"(?P<block>{family.block})\.(?P<rest>.+)")
    found: dict[str, tuple[int, list[str]]] = {}
    for name in checkpoint.names():
        if match := pattern.fullmatch(name):
            found.setdefault(match["block"], (int(match["layer"]), []))[1].append(match["rest"])
    signs = ("experts.", *(layout.first() for layout in family.layouts), *family.router)
    # An encoder runs before its decoder.
    for block, (layer, rests) in sorted(found.items(), key=lambda item: (item[0].startswith("decoder."), item[1][0])):
        if any(rest.startswith(signs) for rest in rests):
            yield block, layer, rests


def _layer_count(checkpoint: Checkpoint) -> int:
    """Layers of the model proper: `num_layers` of a seq2seq model counts its encoder, its decoder may be longer."""
    seq2seq = checkpoint.config.get("is_encoder_decoder")
    return max(_sizes(checkpoint, "layers", _SEQ2SEQ_LAYER_COUNTS if seq2seq else _LAYER_COUNTS).values())


def _expert_count(checkpoint: Checkpoint) -> int:
    counts = _sizes(checkpoint, "experts", _EXPERT_COUNTS)
    if len(set(counts.values())) > 1 or min(counts.values()) < 1:
        raise CheckpointError(f"contradictory numbers of experts: {counts}", file=checkpoint.path / "config.json")
    return next(iter(counts.values()))


def _sizes(checkpoint: Checkpoint, what: str, keys: tuple[str, ...]) -> dict[str, int]:
    """Those of `keys` that config.json holds as integers, one at least."""
    sizes = {key: checkpoint.config[key] for key in keys if isinstance(checkpoint.config.get(key), int)}
    if not sizes:
        raise CheckpointError(f"says no number of {what} ({', '.join(keys)})", file=checkpoint.path / "config.json")
    return sizes


def _read_layer(checkpoint: Checkpoint, family: Family, block: str, rests: list[str], experts: int) -> MoeLayer:
    """Describe the sparse block at `block`, whose tensors are called `rests` below it."""
    layout = _layout(checkpoint, family, block, rests)
    rows = 0
    if isinstance(layout, Stacked):
        rows = _stacked_rows(checkpoint, f"{block}.{layout.gate_up}", experts)
        _stacked_rows(checkpoint, f"{block}.{layout.down}", experts)
    elif experts > len(rests):
        message = f"{experts} experts are configured, the block has {len(rests)} tensors"
        raise CheckpointError(message, file=checkpoint.path, tensor=block)
    module = f"{block.rpartition('.')[0]}.{family.module}.experts"
    projections = tuple(
        Projection(name, _shape(checkpoint, parts), f"{module}.{family.packed.format(name)}", parts, checkpoint)
        for name, parts in layout.parts(block, experts, rows).items()
    )
    _check_shapes(checkpoint, block, projections)
    sources = {source for projection in projections for source in projection.sources}
    for rest in rests:
        if rest.startswith("experts.") and f"{block}.{rest}" not in sources:
            raise CheckpointError(
                f"lies among the experts and is no matrix of the {experts} experts that config.json declares",
                file=checkpoint.info(f"{block}.{rest}").file,
                tensor=f"{block}.{rest}",
            )
    router = tuple(f"{block}.{rest}" for rest in rests if rest.startswith(family.router))
    if not router:
        raise CheckpointError("the block has experts and no router", file=checkpoint.path, tensor=block)
    shared = tuple(f"{block}.{rest}" for rest in rests if family.shared and rest.startswith(family.shared))
    return MoeLayer(module, projections, router, shared)


def _layout(checkpoint: Checkpoint, family: Family, block: str, rests: list[str]) -> Layout:
    """The one layout whose first tensor the block has."""
    layouts = [layout for layout in family.layouts if layout.first() in rests]
    if len(layouts) != 1:
        wanted = ", ".join(f"{block}.{layout.first()}" for layout in family.layouts)
        found = "none" if not layouts else "several"
        raise CheckpointError(f"expected one of {wanted}; found {found}", file=checkpoint.path, tensor=block)
    return layouts[0]


def _stacked_rows(checkpoint: Checkpoint, name: str, experts: int) -> int:
    """Rows of each matrix of a stacked tensor, after holding it against the number of experts."""
    info = checkpoint.info(name)
    if len(info.shape) != 3 or info.shape[0] != experts:
        raise CheckpointError(
            f"has shape {list(info.shape)}, expected {experts} stacked matrices", file=info.file, tensor=name
        )
    return info.shape[1]


def _shape(checkpoint: Checkpoint, parts: tuple[Part, ...]) -> tuple[int, int, int]:
    """Experts, rows, columns; every expert must have the shape of the first and a floating-point dtype."""
    shapes = [_matrix_shape(checkpoint, part) for part in parts]
    for part, shape in zip(parts, shapes, strict=True):
        if shape != shapes[0]:
            raise CheckpointError(
                f"has shape {list(shape)}, the first expert has {list(shapes[0])}",
                file=checkpoint.info(part.tensor).file,
                tensor=part.tensor,
            )
    return len(parts), *shapes[0]


def _matrix_shape(checkpoint: Checkpoint, part: Part) -> tuple[int, int]:
    info = checkpoint.info(part.tensor)
    if info.dtype not in _FLOATS:
        raise UnsupportedModelError(
            f"is stored as {str(info.dtype).removeprefix('torch.')}, already quantized; start from the f32, f16 or "
            "bf16 weights",
            file=info.file,
            tensor=part.tensor,
        )
    shape = info.shape if part.expert is None else info.shape[1:]
    if len(shape) != 2:
        raise CheckpointError(f"has shape {list(info.shape)}, expected a matrix", file=info.file, tensor=part.tensor)
    return (shape[0] if part.rows is None else part.rows[1] - part.rows[0]), shape[1]


def _check_shapes(checkpoint: Checkpoint, block: str, projections: tuple[Projection, ...]) -> None:
    """Every projection but the last maps the hidden state inwards, and the last maps it back."""
    _, rows, columns = projections[0].shape
    expected = [(rows, columns)] * (len(projections) - 1) + [(columns, rows)]
    if [projection.shape[1:] for projection in projections] != expected:
        shapes: dict[str, Any] = {projection.name: list(projection.shape) for projection in projections}
        raise CheckpointError(f"the projections do not fit each other: {shapes}", file=checkpoint.path, tensor=block)
