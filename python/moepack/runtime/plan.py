"""Reading a transformers model into a decoder of the core: which modules it knows, and what of them it needs.

What the core computes is fixed (`_core.Decoder`), so a model is taken only if every module on the way is one that is
known to compute just that: of the very classes of a described architecture, with the very children they are known to
have, and with settings that mean nothing more. Anything else is `Unknown`, and transformers' own code runs.

A plan holds while nothing that it has read is replaced: modules, the memory of tensors, hooks, the modes of products.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from transformers.utils import output_capturing

from moepack.checkpoint.architectures import ARCHITECTURES, Decoder
from moepack.runtime.backends import is_silu
from moepack.runtime.backends.cpu import views
from moepack.runtime.cache import Form
from moepack.runtime.compute import compute_mode
from moepack.runtime.embedding import PackedEmbedding, embedding_dtype
from moepack.runtime.experts import PackedExperts
from moepack.runtime.linear import PackedLinear
from moepack.runtime.packed import PackedModule
from moepack.runtime.store import MappedStore

__all__ = ["Guard", "Plan", "Unknown", "is_known", "require_config"]

_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not change with the length."""


class Unknown(Exception):
    """Something that the core's decoder is not known to compute."""


def is_known(model: nn.Module) -> bool:
    """Whether a model is the decoder of a known architecture; whether it has a plan is seen when it is made."""
    return _kind_of(model) is not None


def _kind_of(model: nn.Module) -> Decoder | None:
    """The described architecture whose decoder a model is, by its class."""
    kinds = (architecture.decoder for architecture in ARCHITECTURES.values())
    return next((kind for kind in kinds if kind is not None and _is(kind, model, "Model")), None)


def _is(kind: Decoder, module: nn.Module, suffix: str) -> bool:
    """Whether a module is of an architecture's class that ends with `suffix`."""
    return f"{type(module).__module__}.{type(module).__qualname__}" == f"transformers.models.{kind.classes}{suffix}"


@dataclass
class Guard:
    """What was read of a model, to see whether it still is there."""

    mode: str = field(default_factory=compute_mode)
    children: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)
    tensors: list[tuple[Mapping[str, Any], str, int]] = field(default_factory=list)
    hooks: list[Mapping[Any, Any]] = field(default_factory=list)
    attributes: list[Mapping[str, Any]] = field(default_factory=list)
    modules: list[tuple[PackedModule, str | None]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> "Guard":
        """A guard of everything in a model but its own hooks and `forward`."""
        guard = cls()
        modules = list(model.modules())
        guard.watch(modules[1:])
        guard.children += [(model._modules, name, child) for name, child in model._modules.items()]
        for module in modules:
            for tensors in (module._parameters, module._buffers):
                found = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
                guard.tensors += [(tensors, name, tensor.data_ptr()) for name, tensor in found]
            if isinstance(module, PackedModule):
                guard.modules.append((module, module.mode))
        return guard

    def holds(self) -> bool:
        """Whether it is."""
        return (
            not any(map(_watched, filter(None, self.hooks)))
            and not any("forward" in attributes for attributes in self.attributes)
            and all(parent.get(name) is child for parent, name, child in self.children)
            and all(_is_at(parent.get(name), pointer) for parent, name, pointer in self.tensors)
            and compute_mode() == self.mode
            and all(module.mode == mode for module, mode in self.modules)
        )

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Watch modules and their children."""
        for name in ("forward", "forward_pre", "backward", "backward_pre"):
            self.hooks.append(getattr(global_hooks, f"_global_{name}_hooks"))
        for module in modules:
            self.children += [(module._modules, name, child) for name, child in module._modules.items()]
            self.hooks += [module._forward_hooks, module._forward_pre_hooks]
            self.hooks += [module._backward_hooks, module._backward_pre_hooks]
            self.attributes.append(module.__dict__)


def _watched(hooks: Mapping[Any, Any]) -> bool:
    """Whether hooks look at a module. Those that transformers leaves behind, once it was asked for outputs of layers,
    look only while it is asked."""
    idle = output_capturing._active_collector.get() is None
    return not idle or any(getattr(hook, "__module__", "") != output_capturing.__name__ for hook in hooks.values())


def _is_at(tensor: torch.Tensor | None, pointer: int) -> bool:
    return tensor is not None and tensor.data_ptr() == pointer


class Plan:
    """A model's decoder in the core.

    Attributes:
        decoder: the core's.
        dtype: of the model's activations.
        forms: for each layer that of its keys and values.

    Args:
        model: the model without its head, in evaluation mode.

    Raises:
        Unknown: the core does not compute this model.
    """

    def __init__(self, model: Any) -> None:
        kind = _kind_of(model)
        if kind is None:
            raise Unknown("the architecture")
        self._kind, self._guard = kind, Guard()
        _require_children(model, {"embed_tokens", "layers", "norm", "rotary_emb"})
        _require(type(model.embed_tokens) in (nn.Embedding, PackedEmbedding), "the embedding")
        self.dtype: torch.dtype = embedding_dtype(model.embed_tokens)
        _require(self.dtype in views.FLOATS, "the dtype of the embedding")
        require_config(model.config)
        frequencies, scale = self._rotary(model.rotary_emb)
        layers = list(model.layers)[: model.config.num_hidden_layers]
        self.forms: list[Form] = []
        described = [self._layer(layer) for layer in layers]
        norm, epsilon = self._norm(model.norm)
        self._guard.watch(module for module in model.modules() if module is not model)
        self._guard.children += [(model._modules, name, child) for name, child in model._modules.items()]
        _require(self.holds(), "hooks")
        self.decoder = views.Decoder(described, frequencies, scale, norm, epsilon)

    def holds(self) -> bool:
        """Whether the model is what it was."""
        return self._guard.holds()

    def _layer(self, layer: Any) -> dict[str, Any]:
        _require(_is(self._kind, layer, "DecoderLayer"), type(layer).__name__)
        _require_children(layer, {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"})
        input_norm, epsilon = self._norm(layer.input_layernorm)
        middle_norm, other = self._norm(layer.post_attention_layernorm)
        attention = self._attention(layer.self_attn, epsilon)
        _require(epsilon == other, "norms")
        norms = {"input_norm": input_norm, "middle_norm": middle_norm, "epsilon": epsilon}
        return norms | attention | self._feed_forward(layer.mlp)

    def _attention(self, attention: Any, epsilon: float) -> dict[str, Any]:
        _require(_is(self._kind, attention, "Attention"), type(attention).__name__)
        norms = {"query_norm": "q_norm", "key_norm": "k_norm"} if self._kind.head_norms else {}
        parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        _require_children(attention, {*parts.values(), *norms.values()})
        _require(getattr(attention, "sliding_window", None) is None, "sliding windows")
        _require(not attention.training or not attention.attention_dropout, "dropout")
        described: dict[str, Any] = {"query_norm": None, "key_norm": None}
        for name, child in parts.items():
            module = getattr(attention, child)
            described[name] = self._matrix(module)
            described[f"{name}_bias"] = None if module.bias is None else self._vector(module, "bias")
        for name, child in norms.items():
            described[name], other = self._norm(getattr(attention, child))
            _require(other == epsilon, "norms of heads")
        width = attention.head_dim
        self.forms.append(Form(1, attention.k_proj.out_features // width, width, self.dtype, "cpu"))
        return described | {"width": width, "scale": float(attention.scaling)}

    def _feed_forward(self, block: Any) -> dict[str, Any]:
        dense: dict[str, Any] = {"router": None, "top_k": 1, "normalized": False, "shared": None, "shared_gate": None}
        if _is(self._kind, block, "MLP"):
            return dense | dict(zip(("gate", "up", "down"), self._mlp(block), strict=True))
        _require(_is(self._kind, block, "SparseMoeBlock"), type(block).__name__)
        beside = {"shared_expert", "shared_expert_gate"} if self._kind.shared else set()
        _require_children(block, {"gate", "experts"} | beside)
        experts, router = block.experts, block.gate
        _require(type(experts) is PackedExperts and is_silu(experts.act_fn), "the experts")
        _require(_is(self._kind, router, "TopKRouter"), type(router).__name__)
        _require_children(router, set())
        described = dense | {name[:-5]: self._packed(experts, name) for name in experts.projections}
        described["router"] = self._dense(router)
        described["top_k"] = int(router.top_k)
        always = self._kind.normalized
        described["normalized"] = bool(router.norm_topk_prob if always is None else always)
        if self._kind.shared:
            described["shared"] = self._mlp(block.shared_expert)
            described["shared_gate"] = self._matrix(block.shared_expert_gate)
            _require(block.shared_expert_gate.bias is None, "a gate with a bias")
        return described

    def _mlp(self, module: Any) -> tuple[Any, Any, Any]:
        _require(_is(self._kind, module, "MLP"), type(module).__name__)
        parts = module.gate_proj, module.up_proj, module.down_proj
        named = {"gate_proj", "up_proj", "down_proj"}
        _require(named <= set(module._modules) <= named | {"act_fn"}, f"the children of {type(module).__name__}")
        _require(is_silu(module.act_fn) and all(part.bias is None for part in parts), "the experts' arithmetic")
        gate, up, down = (self._matrix(part) for part in parts)
        return gate, up, down

    def _norm(self, module: Any) -> tuple[Any, float]:
        _require(_is(self._kind, module, "RMSNorm"), type(module).__name__)
        return self._vector(module, "weight"), float(module.variance_epsilon)

    def _rotary(self, module: Any) -> tuple[Any, float]:
        _require(_is(self._kind, module, "RotaryEmbedding"), type(module).__name__)
        _require(module.rope_type in _ROTARY_TYPES, f"rotary positions of the type {module.rope_type}")
        self._read(module, "inv_freq", module._buffers)
        return views.activations(module.inv_freq.float()), float(module.attention_scaling)

    def _matrix(self, module: nn.Module) -> Any:
        if type(module) is PackedLinear:
            return self._packed(module, "packed")
        _require(type(module) is nn.Linear, type(module).__name__)
        return self._dense(module)

    def _packed(self, module: PackedModule, projection: str) -> Any:
        _require(isinstance(module.store, MappedStore), "bytes that are not in place")
        matrix = module.matrix(projection)
        view = views.packed_matrix(matrix, module.mode)
        _require(view is not None, f"the format {matrix.format}")
        self._guard.tensors.append((module._buffers, projection, module._buffers[projection].data_ptr()))  # type: ignore[union-attr]
        self._guard.modules.append((module, module.mode))
        return view

    def _dense(self, module: nn.Module) -> tuple[Any, None]:
        self._read(module, "weight", module._parameters)
        return views.dense_matrix(module.weight), None  # type: ignore[arg-type]

    def _vector(self, module: nn.Module, name: str) -> Any:
        return views.vector(self._read(module, name, module._parameters))

    def _read(self, module: nn.Module, name: str, tensors: Mapping[str, Any]) -> torch.Tensor:
        tensor: torch.Tensor | None = tensors.get(name)
        _require(tensor is not None and tensor.device.type == "cpu" and tensor.is_contiguous(), f"the memory of {name}")
        assert tensor is not None
        _require(tensors is module._buffers or tensor.dtype == self.dtype, f"the dtype of {name}")
        self._guard.tensors.append((tensors, name, tensor.data_ptr()))
        return tensor


def _require(known: bool, what: str) -> None:
    if not known:
        raise Unknown(what)


def _require_children(module: nn.Module, names: set[str]) -> None:
    _require(set(module._modules) == names, f"the children of {type(module).__name__}")


def require_config(config: Any) -> None:
    """Refuse settings that change what the modules of known classes compute."""
    _require(getattr(config, "clip_qkv", None) is None, "clipped heads")
    kinds = getattr(config, "layer_types", None)
    whole = getattr(config, "sliding_window", None) is None if kinds is None else set(kinds) == {"full_attention"}
    _require(whole, "sliding windows")
