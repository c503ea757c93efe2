"""Describes transformers' experts modules: the layout of their parameters and what they compute.

Transformers 5 keeps routed experts in modules with one interface (`use_experts_implementation`): parameters that stack
all experts, and flags for the layout: gate and up joined or gate missing, rows interleaved, matrices transposed,
biases, a norm after the last product. A few architectures have modules of their own, listed here with equivalent flags.
Modules of any other form are rejected, because a wrong guess would silently pack the wrong numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

__all__ = ["ExpertsForm", "Place", "form_of", "is_experts"]

Shape = tuple[int, int, int]
_ALL = slice(None)


@dataclass(frozen=True)
class Place:
    """The place of a projection in an experts module.

    Attributes:
        parameter: name of the parameter below the module. It stacks all experts.
        rows: the projection's slice of the parameter's output rows.
        transposed: whether the parameter has shape (E, inputs, outputs).
    """

    parameter: str
    rows: slice
    transposed: bool


@dataclass(frozen=True)
class ExpertsForm:
    """The layout and computation of an experts module.

    Attributes:
        kind: "gated" (down(act(gate x) * up x)), "plain" (down(act(up x))), "own" (the module's own `_apply_gate`,
            biases or norm between and after the products), "every" (all experts on rows scaled by the caller),
            "identity" (gated; indices beyond the last expert return the token unchanged), or "product" (one matrix per
            expert, on rows sorted by the caller).
        shapes: shapes (E, R, C) by projection, in the order of computation.
        places: place of each projection.
    """

    kind: str
    shapes: Mapping[str, Shape]
    places: Mapping[str, Place]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that are packed."""
        return tuple(dict.fromkeys(place.parameter for place in self.places.values()))

    def joined(self, values: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """Assemble a parameter of the module from its projections. The rest is zero.

        Args:
            values: the projections of the parameter, each of shape (E, R, C) and of one dtype.
            shape: shape of the parameter.
        """
        out = next(iter(values.values())).new_zeros(shape)
        for projection, matrices in values.items():
            place = self.places[projection]
            turned = matrices.mT if place.transposed else matrices
            if len(shape) == 2:
                out.view(len(matrices), -1, shape[1])[:] = turned
            elif place.transposed:
                out[: len(matrices), :, place.rows] = turned
            else:
                out[: len(matrices), place.rows] = turned
        return out

    def part(self, projection: str, parameter: Tensor) -> Tensor:
        """Return the matrices of a projection, shape (E, R, C): a view of its parameter or of such a tensor."""
        place, experts = self.places[projection], self.shapes[projection][0]
        if parameter.dim() == 2:
            matrices = parameter.view(experts, -1, parameter.shape[1])
            return matrices.mT if place.transposed else matrices
        if place.transposed:
            return parameter[:experts, :, place.rows].mT
        return parameter[:experts, place.rows]

    def packed_name(self, projection: str) -> str:
        """Return the packed tensor's name below the module.

        It is the parameter's name if the parameter holds only this projection, so that transformers without moepack
        finds a wrong shape and fails.
        """
        parameter = self.places[projection].parameter
        alone = sum(place.parameter == parameter for place in self.places.values()) == 1
        return parameter if alone else projection


_INTERFACE = {
    "has_gate": True,
    "is_concatenated": True,
    "is_transposed": False,
    "has_bias": False,
    "has_post_expert_norm": False,
}
"""The flags of the interface, with defaults for transformers versions that lack a flag."""

_OTHERS: Mapping[str, tuple[str, Mapping[str, bool]]] = {
    "DbrxExperts": ("gated", {}),
    "JetMoeParallelExperts": ("product", {}),
    "Llama4TextExperts": ("every", {"is_transposed": True}),
    "LongcatFlashExperts": ("identity", {}),
    "Step3p7Experts": ("own", {}),
}
"""Modules outside the interface: the kind, and the flags that differ from `_INTERFACE`."""


def is_experts(path: str, module: nn.Module) -> bool:
    """Return whether a module holds routed experts, of a known form or not."""
    named = path.endswith(".experts") and any(True for _ in module.parameters())
    return hasattr(module, "is_transposed") or type(module).__name__ in _OTHERS or named


def form_of(module: Any) -> ExpertsForm | None:
    """Return the form of an experts module; None if moepack does not support it."""
    from transformers.integrations import moe

    name = type(module).__name__
    kind, others = _OTHERS.get(name, (None, {}))
    if kind == "product":
        return ExpertsForm(kind, {"matrices": tuple(module.weight.shape)}, {"matrices": Place("weight", _ALL, False)})
    if name == "DbrxExperts":
        return _dbrx(module)
    if kind is None and not hasattr(module, "is_transposed"):
        return None
    flags = {name: getattr(module, name, others.get(name, value)) for name, value in _INTERFACE.items()}
    first = "gate_up_proj" if flags["has_gate"] else "up_proj"
    parameters = {name: tuple(value.shape) for name, value in module.named_parameters(recurse=False)}
    biases = {f"{first}_bias", "down_proj_bias"} if flags["has_bias"] else set()
    if set(parameters) != {first, "down_proj"} | biases or list(module.buffers(recurse=False)):
        return None
    if kind is None:
        kind = _kind(flags, getattr(type(module), "_apply_gate", None) is moe._default_apply_gate)
    return _form(kind, first, parameters, flags)


def _dbrx(module: Any) -> ExpertsForm:
    """Return the form of DBRX: three parameters that stack the rows of all experts, the last one transposed."""
    inner = (module.num_experts, module.ffn_hidden_size, module.hidden_size)
    shapes = {"gate_proj": inner, "up_proj": inner, "down_proj": (inner[0], inner[2], inner[1])}
    names = {"gate_proj": "mlp.w1", "up_proj": "mlp.v1", "down_proj": "mlp.w2"}
    places = {projection: Place(name, _ALL, name == "mlp.w2") for projection, name in names.items()}
    return ExpertsForm("gated", shapes, places)


def _kind(flags: Mapping[str, bool], default_gate: bool) -> str:
    if flags["has_bias"] or flags["has_post_expert_norm"] or (flags["has_gate"] and not default_gate):
        return "own"
    return "gated" if flags["has_gate"] else "plain"


def _form(kind: str, first: str, parameters: Mapping[str, Any], flags: Mapping[str, bool]) -> ExpertsForm | None:
    """Return a form from the parameters' shapes; None if they are inconsistent."""
    transposed = flags["is_transposed"]
    down, joined = (parameters[name] for name in ("down_proj", first))
    if len(down) != 3 or len(joined) != 3:
        return None
    experts, hidden, inner = (down[0], down[2], down[1]) if transposed else down
    outputs = 2 * inner if flags["has_gate"] else inner
    expected = (hidden, outputs) if transposed else (outputs, hidden)
    if joined[1:] != expected or joined[0] < experts or (joined[0] != experts and kind != "identity"):
        return None
    rows = {"up_proj": _ALL}
    if flags["has_gate"] and flags["is_concatenated"]:
        rows = {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)}
    elif flags["has_gate"]:
        rows = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
    places = {name: Place(first, share, transposed) for name, share in rows.items()}
    shapes = dict.fromkeys(rows, (experts, inner, hidden)) | {"down_proj": (experts, hidden, inner)}
    return ExpertsForm(kind, shapes, places | {"down_proj": Place("down_proj", _ALL, transposed)})
