"""Translates a transformers model into a decoder of the core.

The core's computation is fixed (`_core.Decoder`). A model is accepted only if every module on the path is known to
compute exactly that: its class belongs to one of `moepack.decoding.families`, it has the expected children, and its
settings have no further effect. Anything else raises `Unknown`, and the transformers code runs.

A translation is valid until something that it read is replaced: modules, tensor storage, hooks, or compute modes.
Tensors are read in place. Only the packed expansion of latents (DeepSeek's `kv_b_proj`) is decoded for the translation.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from operator import eq, is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks
from transformers.utils import output_capturing

from moepack.backends import is_silu
from moepack.backends.compute import compute_mode
from moepack.backends.cpu import views
from moepack.decoding.cache import Form, States, Tokens
from moepack.decoding.families import family_of
from moepack.hooks import neutral_forward
from moepack.modules.embedding import PackedEmbedding, embedding_dtype
from moepack.modules.experts import PackedExperts, PackedOwnExperts
from moepack.modules.linear import PackedLinear
from moepack.stores.mapped import MappedStore
from moepack.stores.module import PackedModule

__all__ = ["Guard", "Translation", "Unknown", "is_known", "require", "window"]

_ROTARY_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary positions whose frequencies do not depend on the sequence length."""


_SWITCHES = ("_active_adapter", "_disable_adapters", "scaling")
"""Attributes by which peft layers select and scale adapters; their values are fixed in a recorded step."""


class Unknown(Exception):
    """Something that the core's decoder does not support."""


def is_known(model: nn.Module) -> bool:
    """Whether a model is the decoder of a known architecture; `Translation` may still reject it."""
    return family_of(model) is not None


@dataclass
class Entries:
    """Entries of dicts with what is expected there, in columns, which C iterates: a third of the time of a loop."""

    dicts: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)

    def add(self, entries: dict[str, Any], name: str, expected: Any) -> None:
        """Expect something in an entry."""
        self.dicts.append(entries)
        self.names.append(name)
        self.expected.append(expected)

    def found(self) -> Iterator[Any]:
        """What the entries hold; None for missing ones."""
        return map(dict.get, self.dicts, self.names)


@dataclass
class Guard:
    """Everything that was read of a model, to detect changes. `tensors` are expected at addresses."""

    mode: str = field(default_factory=compute_mode)
    children: Entries = field(default_factory=Entries)
    tensors: Entries = field(default_factory=Entries)
    hooks: list[Mapping[Any, Any]] = field(default_factory=list)
    attributes: list[Mapping[str, Any]] = field(default_factory=list)
    forwards: list[Any] = field(default_factory=list)
    modules: dict[PackedModule, tuple[str | None, bool]] = field(default_factory=dict)
    switches: list[tuple[Mapping[str, Any], str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> "Guard":
        """Guard everything in a model except its own hooks and `forward`."""
        guard = cls()
        modules = list(model.modules())
        guard.watch(modules[1:])
        guard.watch_children(model)
        for module in modules:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        guard.tensors.add(tensors, name, tensor.data_ptr())
            if isinstance(module, PackedModule):
                guard.modules[module] = _state(module)
        return guard

    def holds(self) -> bool:
        """Whether the model is unchanged. Each decoding step asks."""
        return (
            not any(map(_watched, filter(None, self.hooks)))
            and all(map(is_, map(_forward, self.attributes), self.forwards))
            and all(map(is_, self.children.found(), self.children.expected))
            and self._are_in_place()
            and compute_mode() == self.mode
            and all(map(eq, map(_state, self.modules), self.modules.values()))
            and all(attributes[name] == value for attributes, name, value in self.switches)
        )

    def _are_in_place(self) -> bool:
        """Whether all tensors are at their addresses."""
        try:
            return all(map(eq, map(torch.Tensor.data_ptr, self.tensors.found()), self.tensors.expected))
        except TypeError:  # one was removed
            return False

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Watch modules and their children."""
        for name in ("forward", "forward_pre", "backward", "backward_pre"):
            self.hooks.append(getattr(global_hooks, f"_global_{name}_hooks"))
        for module in modules:
            self.watch_children(module)
            self.hooks += [module._forward_hooks, module._forward_pre_hooks]
            self.hooks += [module._backward_hooks, module._backward_pre_hooks]
            self.attributes.append(module.__dict__)
            self.forwards.append(neutral_forward(module))
            if "_active_adapter" in module.__dict__:
                found = {name: value for name, value in module.__dict__.items() if name in _SWITCHES}
                self.switches += [(module.__dict__, name, copy(value)) for name, value in found.items()]

    def watch_children(self, module: nn.Module) -> None:
        """Watch the children of a module."""
        for name, child in module._modules.items():
            self.children.add(module._modules, name, child)


_forward = methodcaller("get", "forward")
"""The forward in a module's attributes; None if it is that of its class."""


def _state(module: PackedModule) -> tuple[str | None, bool]:
    """Return the compute mode, and whether inputs are multiplied by factors."""
    return module.mode, module.multiplied is not None


def _watched(hooks: Mapping[Any, Any]) -> bool:
    """Whether any hooks are active.

    transformers leaves hooks behind after layer outputs were requested; these are active only during such a request.
    """
    idle = output_capturing._active_collector.get() is None
    return not idle or any(getattr(hook, "__module__", "") != output_capturing.__name__ for hook in hooks.values())


class Translation:
    """A model's decoder in the core.

    Attributes:
        decoder: the core's decoder.
        dtype: dtype of the model's activations.
        caches: the expected cache contents of each layer.

    Args:
        model: the model without its head, in evaluation mode.

    Raises:
        Unknown: the core does not support this model.
    """

    def __init__(self, model: Any) -> None:
        family = family_of(model)
        if family is None:
            raise Unknown(f"the architecture of {type(model).__name__}")
        self._family, self._guard, self._config = family, Guard(), model.config
        _require_children(model, {"embed_tokens", "layers", "norm", "rotary_emb"})
        require(
            type(model.embed_tokens) in (nn.Embedding, PackedEmbedding),
            f"embeddings of the type {type(model.embed_tokens).__name__}",
        )
        self.dtype: torch.dtype = embedding_dtype(model.embed_tokens)
        require(self.dtype in views.FLOATS, f"activations in {self.dtype}")
        require(getattr(model.config, "clip_qkv", None) is None, "clipped heads")
        rotary = self._rotary(model.rotary_emb)
        layers = list(model.layers)[: model.config.num_hidden_layers]
        self.caches: list[Tokens | States] = []
        described = [self._layer(number, layer) for number, layer in enumerate(layers)]
        norm = self._norm(model.norm)
        self._guard.watch(module for module in model.modules() if module is not model)
        self._guard.watch_children(model)
        require(self.holds(), "hooks, or layers whose forward was replaced")
        require(not any(scaled for _, scaled in self._guard.modules.values()), "layers in the scales of another model")
        self.decoder = views.Decoder(described, rotary, norm)

    def holds(self) -> bool:
        """Whether the model is unchanged."""
        return self._guard.holds()

    def _layer(self, number: int, layer: Any) -> dict[str, Any]:
        require(self._family.has(layer, "DecoderLayer"), type(layer).__name__)
        mixer = "linear_attn" if "linear_attn" in layer._modules else "self_attn"
        _require_children(layer, {mixer, "mlp", "input_layernorm", "post_attention_layernorm"})
        mixed = self._delta(layer.linear_attn) if mixer == "linear_attn" else self._attention(number, layer.self_attn)
        norms = {"norm": self._norm(layer.input_layernorm), "middle_norm": self._norm(layer.post_attention_layernorm)}
        return norms | {"mixer": mixed} | self._feed_forward(layer.mlp)

    def _attention(self, number: int, attention: Any) -> dict[str, Any]:
        require(self._family.has(attention, "Attention"), type(attention).__name__)
        require(not attention.training or not attention.attention_dropout, "dropout in attention")
        if "kv_b_proj" in attention._modules:
            return self._latent(attention)
        parts = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
        norms = {"query_norm": "q_norm", "key_norm": "k_norm"}
        has_norms = "q_norm" in attention._modules
        _require_children(attention, {*parts.values(), *(norms.values() if has_norms else ())})
        require(set(attention._parameters) <= {"sinks"}, "attention parameters other than sinks")
        described: dict[str, Any] = {name: self._linear(getattr(attention, child)) for name, child in parts.items()}
        described |= {
            name: self._norm(getattr(attention, child)) if has_norms else None for name, child in norms.items()
        }
        described["sinks"] = self._vector(attention, "sinks") if "sinks" in attention._parameters else None
        width = attention.head_dim
        form = Form(1, attention.k_proj.out_features // width, (width, width), self.dtype, "cpu")
        self.caches.append(Tokens(form, window(self._config, number)))
        return described | {"gated": self._family.gated, "width": width, "scale": float(attention.scaling)}

    def _latent(self, attention: Any) -> dict[str, Any]:
        queries = {"q_a_proj", "q_a_layernorm", "q_b_proj"} if attention.q_lora_rank is not None else {"q_proj"}
        _require_children(attention, {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"} | queries)
        query_latent = None
        if attention.q_lora_rank is not None:
            query_latent = self._linear(attention.q_a_proj), self._norm(attention.q_a_layernorm)
        widths = attention.kv_lora_rank, attention.qk_rope_head_dim
        self.caches.append(Tokens(Form(1, 1, widths, self.dtype, "cpu"), None))
        return {
            "query_latent": query_latent,
            "query": self._linear(attention.q_b_proj if query_latent else attention.q_proj),
            "latent": self._linear(attention.kv_a_proj_with_mqa),
            "norm": self._norm(attention.kv_a_layernorm),
            "expansion": self._values(attention.kv_b_proj),
            "output": self._linear(attention.o_proj),
            "heads": attention.num_heads,
            "scale": float(attention.scaling),
        }

    def _delta(self, rule: Any) -> dict[str, Any]:
        require(self._family.has(rule, "GatedDeltaNet"), type(rule).__name__)
        require(
            rule.activation == "silu" and rule.conv1d.bias is None,
            "convolutions with biases or activations other than silu",
        )
        parts: tuple[str, ...] = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        if "in_proj_qkvz" in rule._modules:
            parts = ("in_proj_qkvz", "in_proj_ba")
        _require_children(rule, {"conv1d", "norm", "out_proj", *parts})
        for part in parts:
            require(getattr(rule, part).bias is None, "biases of a delta rule")
        inputs = 1, rule.conv_dim, rule.conv_kernel_size
        self.caches.append(States(inputs, (1, rule.num_v_heads, rule.head_k_dim, rule.head_v_dim), self.dtype))
        return {
            "inputs": [self._matrix(getattr(rule, part)) for part in parts],
            "convolution": self._vector(rule.conv1d, "weight"),
            "decay": self._vector(rule, "A_log"),
            "decay_bias": self._vector(rule, "dt_bias"),
            "norm": self._norm(rule.norm, "RMSNormGated", 0.0),
            "output": self._linear(rule.out_proj),
            "key_heads": rule.num_k_heads,
            "width": rule.head_k_dim,
        }

    def _feed_forward(self, block: Any) -> dict[str, Any]:
        if not self._family.has(block, self._family.sparse):
            return {"router": None, "experts": self._mlp(block), "shared": None}
        names = set(block._modules)
        shared = next(iter(names & {"shared_expert", "shared_experts"}), None)
        gate = {"shared_expert_gate"} & names
        router = "router" if "router" in names else "gate"
        _require_children(block, {router, "experts"} | gate | ({shared} if shared else set()))
        described = {"router": self._router(getattr(block, router)), "experts": self._experts(block.experts)}
        if shared is None:
            return described | {"shared": None}
        weight = self._matrix(block.shared_expert_gate) if gate else None
        require(not gate or block.shared_expert_gate.bias is None, "a gate with a bias")
        return described | {"shared": (self._mlp(getattr(block, shared)), weight)}

    def _router(self, router: Any) -> dict[str, Any]:
        require(self._family.has(router, self._family.router), type(router).__name__)
        _require_children(router, set())
        require(set(router._parameters) <= {"weight", "bias"}, "router parameters other than weights and biases")
        groups: tuple[int, int, int] | None = None
        method = getattr(router, "topk_method", "group_limited_greedy")
        require(method in ("greedy", "group_limited_greedy"), f"the router's method {method}")
        if method != "greedy" and (getattr(router, "num_group", None) or 1) > 1:
            groups = int(router.num_group), int(router.topk_group), self._family.summed
        always = self._family.normalized
        return {
            "weights": self._dense(router, torch.float32),  # transformers keeps some routers in float32
            "bias": self._vector(router, "bias") if "bias" in router._parameters else None,
            "sigmoid": self._family.sigmoid,
            "correction": self._vector(router, "e_score_correction_bias") if router._buffers else None,
            "groups": groups,
            "top_k": int(router.top_k),
            "normalized": bool(router.norm_topk_prob if always is None else always),
            "scale": float(getattr(router, "routed_scaling_factor", 1.0)),
        }

    def _experts(self, experts: Any) -> dict[str, Any]:
        described: dict[str, Any] = {"clamped": None, "biases": None}
        if type(experts) is PackedOwnExperts:
            (original,) = experts._original
            require(self._family.has(original, "Experts"), f"experts of the type {type(original).__name__}")
            require(hasattr(original, "alpha") and hasattr(original, "limit"), "experts without a clamped gate")
            described["clamped"] = float(original.alpha), float(original.limit)
            described["biases"] = self._vector(experts, "gate_up_proj_bias"), self._vector(experts, "down_proj_bias")
        else:
            require(
                type(experts) is PackedExperts and is_silu(experts.act_fn), f"this form of {type(experts).__name__}"
            )
        return described | {name[:-5]: self._packed(experts, name) for name in experts.projections}

    def _mlp(self, module: Any) -> dict[str, Any]:
        require(self._family.has(module, "MLP"), type(module).__name__)
        parts = module.gate_proj, module.up_proj, module.down_proj
        named = {"gate_proj", "up_proj", "down_proj"}
        require(
            named <= set(module._modules) <= named | {"act_fn"},
            f"unexpected submodules of {type(module).__name__}",
        )
        require(
            is_silu(module.act_fn) and all(part.bias is None for part in parts),
            "dense layers with biases or activations other than silu",
        )
        gate, up, down = (self._matrix(part) for part in parts)
        return {"gate": gate, "up": up, "down": down, "clamped": None, "biases": None}

    def _norm(self, module: Any, suffix: str = "RMSNorm", offset: float | None = None) -> tuple[Any, float, float]:
        require(self._family.has(module, suffix), type(module).__name__)
        epsilon = module.eps if hasattr(module, "eps") else module.variance_epsilon
        return self._vector(module, "weight"), float(epsilon), self._family.norm_offset if offset is None else offset

    def _rotary(self, module: Any) -> dict[str, Any]:
        require(self._family.has(module, self._family.rotary), type(module).__name__)
        require(module.rope_type in _ROTARY_TYPES, f"rotary positions of the type {module.rope_type}")
        self._read(module, "inv_freq", module._buffers)
        interleaved = getattr(self._config, "rope_interleave", False)
        return {
            "frequencies": views.activations(module.inv_freq.float()),
            "scale": float(module.attention_scaling),
            "order": "pairs to halves" if interleaved else self._family.order,
        }

    def _linear(self, module: Any) -> tuple[Any, Any]:
        return self._matrix(module), None if module.bias is None else self._vector(module, "bias")

    def _matrix(self, module: nn.Module) -> Any:
        if type(module) is PackedLinear:
            return self._packed(module, "packed")
        require(type(module) is nn.Linear, type(module).__name__)
        return self._dense(module)

    def _packed(self, module: PackedModule, projection: str) -> Any:
        require(isinstance(module.store, MappedStore), "packed weights that are not in mapped memory")
        matrix = module.matrix(projection)
        view = views.packed_matrix(matrix, module.mode)
        require(view is not None, f"the format {matrix.format} in the mode {module.mode}")
        buffer = module._buffers[projection]
        assert buffer is not None
        self._guard.tensors.add(module._buffers, projection, buffer.data_ptr())
        self._guard.modules[module] = _state(module)
        return view

    def _dense(self, module: nn.Module, *others: torch.dtype) -> tuple[Any, None]:
        """A dense matrix in the model's dtype, or in another one that the module supports."""
        weight = self._read(module, "weight", module._parameters)
        require(weight.dtype in (self.dtype, *others), f"a {weight.dtype} weight of {type(module).__name__}")
        return views.dense_matrix(weight), None

    def _values(self, module: Any) -> Any:
        """The values of a linear layer without a bias, in row-major order."""
        require(module.bias is None, "latents with a bias")
        if type(module) is not PackedLinear:
            require(type(module) is nn.Linear, type(module).__name__)
            return self._vector(module, "weight")
        self._packed(module, "packed")
        return views.decoded(module.matrix("packed"), self.dtype)

    def _vector(self, module: nn.Module, name: str) -> Any:
        return views.vector(
            self._read(module, name, module._parameters if name in module._parameters else module._buffers)
        )

    def _read(self, module: nn.Module, name: str, tensors: dict[str, Any]) -> torch.Tensor:
        tensor: torch.Tensor | None = tensors.get(name)
        require(
            tensor is not None and tensor.device.type == "cpu" and tensor.is_contiguous(),
            f"a {name} that is not contiguous in CPU memory",
        )
        assert tensor is not None
        require(tensor.dtype in views.FLOATS, f"a {name} in {tensor.dtype}")
        self._guard.tensors.add(tensors, name, tensor.data_ptr())
        return tensor


def require(known: bool, what: str) -> None:
    """Raise `Unknown` unless the condition holds; `what` names the unsupported feature."""
    if not known:
        raise Unknown(what)


def _require_children(module: nn.Module, names: set[str]) -> None:
    found = {name for name, child in module._modules.items() if child is not None}
    require(found == names, f"unexpected submodules of {type(module).__name__}")


def window(config: Any, layer: int) -> int | None:
    """Return how many tokens an attention layer attends to, including the current one; None for all.

    Raises:
        Unknown: the layer has another type.
    """
    kinds = getattr(config, "layer_types", None)
    kind = "full_attention" if kinds is None else kinds[layer]
    require(kind in ("full_attention", "sliding_attention"), f"layers of the type {kind}")
    seen = getattr(config, "sliding_window", None)
    return seen if kinds is None or kind == "sliding_attention" else None
