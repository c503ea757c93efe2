"""Layers on a GPU in few launches.

transformers' modules launch 66 kernels per layer. In recorded decoding steps, the layers of known families
(`moepack.decoding.families`) run as follows, for models of bfloat16 and float16:

1. sum of the residual and the previous layer's output, and norm (`add_norm`);
2. queries, keys and values in one product;
3. their norms, rotary embeddings and the append to the cache (`prepare_heads`);
4. attention, without copies of grouped keys and values;
5. output projection;
6. sum and norm;
7. logits of the router;
8. choice and weights of experts;
9. experts (two or more launches, by format).

Prompts use the same norms, sums and routers, and products and attention of torch. Each part falls back to its module:
latent or gated attention, routers that choose by groups, packed projections. In other families, attention of single
tokens reads grouped heads without copies, too.

Invariants:
- Norms and routers are replaced only if a trial shows the same results. Other parts are replaced by the class of their
  module, which `Family` describes.
- Operations are rounded like transformers' modules; sums may be in another order.
- On several GPUs, each layer runs on that of its weights, and copies its inputs there.
- Modules are restored at the end of the context. Other threads that call them meanwhile get the same results, and
  gradients, because replacements leave calls that record gradients to the modules.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from moepack.backends.gpu import dense, prompt_attention, router, step
from moepack.backends.gpu.attention import Attention
from moepack.backends.gpu.draw import draw
from moepack.backends.gpu.recording import crossing
from moepack.backends.gpu.rooms import Rooms
from moepack.decoding.cache import Appended, Room
from moepack.decoding.families import Family, family_of
from moepack.decoding.held import Passing, Shape
from moepack.decoding.translation import Unknown, window
from moepack.hooks import has_own_forward
from moepack.modules.experts import PackedExperts

__all__ = ["Operations", "Replacements"]

_DTYPES = (torch.bfloat16, torch.float16)


class Operations:
    """What layers consist of, one launch each on one GPU.

    Args:
        device: the GPU.
    """

    multiply = staticmethod(dense.multiply)
    multiplies = staticmethod(dense.supports)
    add_norm = staticmethod(step.add_norm)
    rms_norm = staticmethod(step.rms_norm)
    norm_of = staticmethod(step.norm_of)
    prepare_heads = staticmethod(step.prepare_heads)
    prepare_heads_in_rooms = staticmethod(step.prepare_heads_in_rooms)
    tile_rows = staticmethod(prompt_attention.tile_rows)
    rotates = staticmethod(step.supports_heads)
    choose = staticmethod(router.choose)
    draw = staticmethod(draw)

    def __init__(self, device: torch.device) -> None:
        self._attention = Attention(device)
        self.attend: Callable[..., Tensor | None] = self._attention

    def attends(self, dtype: torch.dtype, width: int) -> bool:
        """Whether `prepare_heads` and `attend` support heads of a width."""
        return dtype in _DTYPES and not width % 64 and width <= 256

    def attends_in_rooms(self, dtype: torch.dtype, width: int) -> bool:
        """Whether `attend_in_rooms` supports heads of a width."""
        return prompt_attention.supports(dtype, width)

    def attend_in_rooms(
        self, queries: Tensor, rooms: Rooms, is_prompt: bool, groups: int, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Attend to a token and earlier ones of its sequence; arguments as in `prompt_attention.attend`.

        Rows lie in tiles if it is a prompt; otherwise each is a token of its own sequence.
        """
        if is_prompt:
            return prompt_attention.attend(queries, rooms, groups, scale, sinks)
        return self._attention.in_rooms(queries, rooms, groups, scale, sinks)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply x [T, C] by one matrix [R, C]."""
        if x.dtype is weight.dtype and self.multiplies([weight], len(x)):
            return self.multiply(x, [weight], [bias])
        return functional.linear(x, weight, bias)


class Replacements:
    """What takes the place of a model's modules on a GPU.

    Args:
        model: a decoder without its head; unchanged and without hooks as long as replacements are used.
        operations: what computes the parts; None for the kernels.
    """

    def __init__(self, model: nn.Module, operations: Operations | None = None) -> None:
        self.layers: list[_Layer] = []
        self._places: list[step.Place] = []
        self._devices = list(dict.fromkeys(tensor.device for tensor in model.parameters()))
        are_gpus = all(device.type == "cuda" for device in self._devices)
        self._operations: dict[torch.device, Operations] = {}
        if operations is not None or (are_gpus and self._devices):
            with on(self._devices[0]):
                self._make(model, {device: operations or Operations(device) for device in self._devices})

    @property
    def held_shape(self) -> tuple[Shape, int] | None:
        """Keys and values of passes over several sequences, and rows of a tile of prompts; None without such passes."""
        attentions = [layer.attention for layer in self.layers]
        parts = [None if attention is None else attention.held_shape for attention in attentions]
        if not parts or len({*parts}) > 1 or parts[0] is None:
            return None
        groups, group, width, dtype = parts[0]
        windows = tuple(attention.window for attention in attentions if attention is not None)
        devices = tuple(layer.device for layer in self.layers)
        return Shape(windows, groups, width, dtype, devices), self._operations[devices[0]].tile_rows(group)

    @property
    def is_spread(self) -> bool:
        """Whether layers are on several devices."""
        return len(self._devices) > 1

    def draw(self, logits: Tensor, draws: Tensor) -> Tensor:
        """Choose tokens; see `moepack.backends.gpu.draw.draw`."""
        with on(logits.device):
            return self._operations[logits.device].draw(logits, draws)

    def _make(self, model: Any, operations: dict[torch.device, Operations]) -> None:
        """Find the modules to replace."""
        family = family_of(model)
        if family is not None:
            self.layers = _layers(model, family, operations)
        if len(operations) > 1 and not self.layers:
            return  # nothing would copy inputs to the GPU of a module, and make it the current one
        self._operations = operations
        inner: list[tuple[Any, Callable[..., Any] | None]] = [(layer.module, layer) for layer in self.layers]
        if self.layers:
            inner.append((model.norm, _Last(self.layers[-1].chain, model.norm)))
        if len(operations) > 1:
            inner.append((model.rotary_emb, _rotary_on(model.rotary_emb, self.layers[0].device)))
        for module in model.modules():
            if family is not None and family.has(module, family.router):
                inner.append((module, _Router.of(module, family, operations[module.weight.device])))
            elif type(module) is nn.Linear:
                inner.append((module, _Linear(module, operations[module.weight.device])))
        self._places = [*step.norms(model), *step.rotations(model)]
        self._places += [(vars(module), "forward", forward) for module, forward in inner if forward is not None]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Replace modules within the context. One thread at a time."""
        if not self._operations:
            yield
            return
        with on(self._devices[0]), step.replaced(self._places), _grouped_attention(self._operations):
            yield


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which kernels run on a device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _rotary_on(module: Any, device: torch.device) -> Callable[..., Any]:
    """The forward of rotary positions whose frequencies are on a device."""
    moved = copy(module)
    moved._buffers = {name: buffer.to(device) for name, buffer in module._buffers.items()}
    vars(moved).pop("forward", None)
    return moved.forward  # type: ignore[no-any-return]


class _Linear:
    """The forward of a dense layer."""

    def __init__(self, module: nn.Linear, operations: Operations) -> None:
        self._own, self._operations = module.forward, operations
        self._weight, self._bias = module.weight, module.bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if (
            torch.is_grad_enabled()
            or x.dtype is not self._weight.dtype
            or not self._operations.multiplies([self._weight], len(rows))
        ):
            return self._own(x)
        return self._operations.multiply(rows, [self._weight], [self._bias]).view(*x.shape[:-1], -1)


class _Router:
    """The forward of a router: logits, weights of the chosen experts, their indices."""

    def __init__(self, module: Any, family: Family, operations: Operations) -> None:
        self._module, self._operations, self._sigmoid = module, operations, family.sigmoid
        self._own = module.forward
        always = family.normalized
        self._normalized = bool(module.norm_topk_prob if always is None else always)
        self._scale = float(getattr(module, "routed_scaling_factor", 1.0))
        self._correction: Tensor | None = getattr(module, "e_score_correction_bias", None)

    @classmethod
    def of(cls, module: Any, family: Family, operations: Operations) -> "_Router | None":
        """The forward, if a trial on random tokens gives the results of the module."""
        weight = module.weight
        sizes_fit = len(weight) <= router.MOST_EXPERTS and int(module.top_k) <= router.MOST_CHOICES
        if not sizes_fit or (getattr(module, "num_group", None) or 1) > 1 or not has_own_forward(module):
            return None
        found = cls(module, family, operations)
        generator = torch.Generator(weight.device).manual_seed(0)
        dtype = weight.dtype if weight.dtype in _DTYPES else torch.float32
        x = torch.randn(3, weight.shape[1], generator=generator, device=weight.device).to(dtype)
        try:
            with torch.no_grad(), on(weight.device):
                (_, own, index), (logits, scores, chosen) = module(x), found(x)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return None
        tolerance = 8 * torch.finfo(dtype).eps
        # Experts with equal logits may be chosen in any order.
        pairs = (own.float(), scores), (logits.gather(1, index), logits.gather(1, chosen))
        same = all(torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in pairs)
        return found if same else None

    def __call__(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if torch.is_grad_enabled():
            return self._own(hidden_states)  # type: ignore[no-any-return]
        x, weight = hidden_states.reshape(-1, hidden_states.shape[-1]), self._module.weight
        if self._sigmoid:  # these routers compute in float32
            x, weight = x.float(), weight.float()
        logits = self._operations.product(x, weight, getattr(self._module, "bias", None))
        index, weights = self._operations.choose(
            logits, int(self._module.top_k), sigmoid=self._sigmoid, normalized=self._normalized,
            correction=self._correction, scale=self._scale,
        )  # fmt: skip
        return logits, weights, index


class _Chain:
    """A layer's output, with its norm for the next layer."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._normed: Tensor | None = None

    def put(self, total: Tensor, normed: Tensor) -> Tensor:
        """Keep both; returns the output."""
        self._total, self._normed = total, normed
        return total

    def take(self, total: Tensor) -> Tensor | None:
        """The norm of this output, [B, H], if it is the kept one."""
        normed = self._normed if total is self._total else None
        self._total = self._normed = None
        return normed


class _Last:
    """The forward of the norm behind the last layer."""

    def __init__(self, chain: _Chain, module: Any) -> None:
        self._chain, self._own, self._device = chain, module.forward, module.weight.device

    def __call__(self, hidden_states: Tensor) -> Tensor:
        normed = self._chain.take(hidden_states)
        if normed is not None:
            return normed.view(hidden_states.shape)
        (hidden_states,) = crossing([hidden_states], self._device)
        with on(self._device):
            return self._own(hidden_states)  # type: ignore[no-any-return]


Turns = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions."""


class _Turns:
    """The rotary positions of a pass on each device that it has come to."""

    def __init__(self) -> None:
        self._first: Turns | None = None
        self._copies: dict[torch.device, Turns] = {}

    def arrive(self, x: Tensor, turns: Turns | None, device: torch.device) -> tuple[Tensor, Turns | None]:
        """Activations and positions on a device."""
        if turns is not self._first:
            self._first, self._copies = turns, {}
        known = turns is None or turns[0].device == device or device in self._copies
        moved = [] if known or turns is None else [*turns]
        if x.device != device:
            x, *moved = crossing([x, *moved], device)
        elif moved:
            moved = [*crossing(moved, device)]
        if moved:
            self._copies[device] = moved[0], moved[1]
        return x, self._copies.get(device, turns)


def _layers(model: Any, family: Family, all_operations: Mapping[torch.device, Operations]) -> list["_Layer"]:
    """The layers of a model whose parts are known; none if any layer has another form, or is on several devices."""
    layers, chain, turns = list(model.layers)[: model.config.num_hidden_layers], _Chain(), _Turns()
    parts = {"mlp", "input_layernorm", "post_attention_layernorm"}
    for layer in layers:
        if not family.has(layer, "DecoderLayer") or not parts <= layer._modules.keys() or len(layer._modules) != 4:
            return []
    places = [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)]
    operations = next(iter(all_operations.values()))
    norms = [norm for place in (*places, model.norm) if (norm := operations.norm_of(place)) is not None]
    if len(norms) != 2 * len(layers) + 1:
        return []
    found = []
    for n, layer in enumerate(layers):
        (device, *others) = dict.fromkeys(parameter.device for parameter in layer.parameters())
        if others:
            return []
        operations, own = all_operations[device], norms[2 * n : 2 * n + 3]
        own[2] = own[2]._replace(weight=own[2].weight.to(device))  # the following layer may be elsewhere
        attention = _Attention.of(layer, model.config, family, operations)
        experts = _only_experts(layer.mlp, family)
        found.append(_Layer(layer, attention, own, (chain, turns), operations, experts))
    return found


class _Layer:
    """The forward of a layer.

    Args:
        module: the layer.
        attention: its attention, or None to run the module's.
        norms: before attention, before the experts, and of the following layer.
        shared: with the other layers: what passes the output's norm on, and the rotary positions.
        operations: what computes the parts.
        experts: the router and the experts, if they are all that follows attention; None to run the module.
    """

    def __init__(
        self,
        module: Any,
        attention: "_Attention | None",
        norms: list[step.Norm],
        shared: tuple[_Chain, _Turns],
        operations: Operations,
        experts: tuple[Any, PackedExperts] | None,
    ) -> None:
        self._experts = experts
        self.module, (self.chain, self._turns), self.device = module, shared, norms[0].weight.device
        self._own, self.attention, self._operations = module.forward, attention, operations
        self._norm, self._middle, self._following = norms

    def __call__(self, hidden_states: Tensor, *args: Any, **named: Any) -> Any:
        if args or torch.is_grad_enabled() or not hidden_states.numel():
            return self._own(hidden_states, *args, **named)
        if "position_embeddings" in named:
            turns = named["position_embeddings"]
            hidden_states, named["position_embeddings"] = self._turns.arrive(hidden_states, turns, self.device)
        with on(self.device):
            return self._computed(hidden_states, named)

    def _computed(self, hidden_states: Tensor, named: dict[str, Any]) -> Tensor:
        """The layer's output, with inputs on its device."""
        cache = next((value for value in named.values() if isinstance(value, Appended | Passing)), None)
        shape, operations = hidden_states.shape, self._operations
        residual = hidden_states.reshape(-1, shape[2])
        normed = self.chain.take(hidden_states)
        if normed is None:
            normed = operations.rms_norm(residual, *self._norm)
        if self.attention is not None and cache is not None and self.attention.supports(shape, named, cache):
            mixed = self.attention(normed, cache, named["position_embeddings"], named.get("attention_mask"))
        else:
            mixed = self.module.self_attn(hidden_states=normed.view(shape), **named)[0]
        residual, normed = operations.add_norm(residual, mixed.reshape(residual.shape), *self._middle)
        output = self._feed_forward(normed, shape)
        total, normed = operations.add_norm(residual, output.reshape(residual.shape), *self._following)
        return self.chain.put(total.view(shape), normed)

    def _feed_forward(self, x: Tensor, shape: torch.Size) -> Tensor:
        """The output of the experts, [T, H], float32 if they are all that the module has."""
        if self._experts is not None:
            router, experts = self._experts
            _, weights, index = router(x)
            found: Tensor = experts.in_float32(x, index, weights)
            return found
        output: Any = self.module.mlp(x.view(shape))
        first: Tensor = output[0] if isinstance(output, tuple) else output
        return first


def _only_experts(module: Any, family: Family) -> tuple[Any, PackedExperts] | None:
    """The router and the experts of a module that has nothing else."""
    experts = module._modules.get("experts")
    if not family.has(module, family.sparse) or type(experts) is not PackedExperts or len(module._modules) != 2:
        return None
    (router,) = (child for child in module._modules.values() if child is not experts)
    return (router, experts) if family.has(router, family.router) else None


class _Attention:
    """Attention with separate queries, keys and values whose halves are rotated.

    Args:
        module: the attention of transformers.
        norms: of queries and keys, or None.
        operations: what computes it.
        dtype: of keys and values.
        window: tokens that a token attends to, including itself; 0 for all.
        folded: see `Family`.
    """

    def __init__(
        self,
        module: Any,
        norms: list[step.Norm | None],
        operations: Operations,
        dtype: torch.dtype,
        window: int,
        folded: bool,
    ) -> None:
        self._module, self._operations, self._width, self._dtype = module, operations, int(module.head_dim), dtype
        self.window, self._folded = window, folded
        self._inputs: list[Any] = [module.q_proj, module.k_proj, module.v_proj]
        self._norms = norms
        self._sinks = getattr(module, "sinks", None)

    @classmethod
    def of(cls, layer: Any, config: Any, family: Family, operations: Operations) -> "_Attention | None":
        """The attention of a layer; None if it has another form."""
        module = layer._modules.get("self_attn")
        names = {"q_proj", "k_proj", "v_proj", "o_proj"}
        plain = family.order == "halves" and not family.norm_offset and not family.gated
        if module is None or not plain or not family.has(module, "Attention"):
            return None
        if not names <= module._modules.keys() <= names | {"q_norm", "k_norm"}:
            return None
        if getattr(config, "clip_qkv", None) is not None:
            return None
        if not operations.attends(layer.input_layernorm.weight.dtype, int(module.head_dim)):
            return None
        norms = [operations.norm_of(getattr(module, name)) if name in module._modules else None
                 for name in ("q_norm", "k_norm")]  # fmt: skip
        known = [norm for norm in norms if norm is not None]
        if "q_norm" in module._modules and (len(known) < 2 or known[0][1:] != known[1][1:] or known[0].late):
            return None
        try:
            seen = window(config, module.layer_idx) or 0
        except Unknown:
            return None
        return cls(module, norms, operations, layer.input_layernorm.weight.dtype, seen, family.folded)

    @property
    def held_shape(self) -> tuple[int, int, int, torch.dtype] | None:
        """Groups, heads of each, columns and dtype of keys and values; None without passes over several sequences."""
        config, dtype = self._module.config, self._dtype
        groups, heads = int(config.num_key_value_heads), int(config.num_attention_heads)
        if not self._operations.attends_in_rooms(dtype, self._width):
            return None
        return groups, heads // groups, self._width, dtype

    def supports(self, shape: torch.Size, named: dict[str, Any], cache: Appended | Passing) -> bool:
        """Whether this is one token per sequence or a pass, with columns to rotate that the kernel supports."""
        turns = named.get("position_embeddings")
        if turns is None or not self._operations.rotates(self._width, turns[0].shape[-1] * (2 if self._folded else 1)):
            return False
        return shape[1] == 1 or isinstance(cache, Passing)

    def __call__(
        self, x: Tensor, cache: Appended | Passing, turns: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> Tensor:
        """Attend with normed inputs [B, H]; cos and sin are [1 or B, 1, R], the mask [B, 1, 1, capacity].

        In a pass, B is the number of rows, cos and sin are [1, B, R], and the mask is not used.
        """
        room, width = cache.rooms[self._module.layer_idx], self._width
        queries, keys, values = (part.view(len(x), -1, width) for part in self._products(x))
        cos, sin = (part.reshape(-1, part.shape[-1]).expand(len(x), -1) for part in turns)
        heads = step.HeadRows(queries, keys, values, *self._weights(), cos, sin, self._folded)
        if isinstance(cache, Passing):
            return self._in_rooms(heads, room, cache.is_prompt)
        assert isinstance(room, Room)
        turned = self._operations.prepare_heads(heads, cache.place, room.keys, room.values)
        mask = None if mask is None else mask.reshape(len(x), -1)
        mixed = self._operations.attend(turned, room.keys, room.values, mask, float(self._module.scaling), self._sinks)
        if mixed is None:
            raise RuntimeError("attention of this form")  # ends the recording; `of` admits no such form
        output: Tensor = self._module.o_proj(mixed.flatten(1))
        return output

    def _in_rooms(self, heads: step.HeadRows, rooms: Rooms, is_prompt: bool) -> Tensor:
        """Attend with the heads of rows of several sequences; [R, H]."""
        turned, groups = self._operations.prepare_heads_in_rooms(heads, rooms), heads.keys.shape[1]
        scale = float(self._module.scaling)
        mixed = self._operations.attend_in_rooms(turned, rooms, is_prompt, groups, scale, self._sinks)
        output: Tensor = self._module.o_proj(mixed.flatten(1))
        return output

    def _weights(self) -> tuple[Tensor | None, Tensor | None, float]:
        """Norms of single heads, and their epsilon."""
        query, key = self._norms
        if query is None or key is None or len(query.weight) != self._width:
            return None, None, 0.0
        return query.weight, key.weight, query.epsilon

    def _products(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, rows]; views of one product if it is possible."""
        parts = self._inputs
        if all(type(part) is nn.Linear for part in parts):
            weights: list[Tensor] = [part.weight for part in parts]
            if self._operations.multiplies(weights, len(x)):
                joint = self._operations.multiply(x, weights, [part.bias for part in parts])
                queries, keys, values = torch.split(joint, [len(weight) for weight in weights], 1)
                return *self._normalized(queries, keys), values
        queries, keys, values = (part(x) for part in parts)
        return *self._normalized(queries, keys), values

    def _normalized(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Apply norms that extend over all heads."""
        query, key = self._norms
        if query is None or key is None or len(query.weight) == self._width:
            return queries, keys
        return self._operations.rms_norm(queries, *query), self._operations.rms_norm(keys, *key)


@contextmanager
def _grouped_attention(operations: Mapping[torch.device, Operations]) -> Iterator[None]:
    """Let transformers' attention read grouped heads of one token without copies."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # imports this package, so not at the top

    name = "sdpa"
    own = ALL_ATTENTION_FUNCTIONS[name]

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        scaling: float | None = None,
        **named: Any,
    ) -> Any:
        (batch, _, tokens, width), plain = query.shape, not (args or named.get("dropout") or torch.is_grad_enabled())
        plain = plain and named.get("s_aux") is None and named.get("position_bias") is None
        if plain and tokens == 1 and (attention_mask is None or attention_mask.shape[:3] == (batch, 1, 1)):
            mask = None if attention_mask is None else attention_mask.reshape(batch, -1)
            scale = width**-0.5 if scaling is None else scaling
            found = operations[query.device].attend(query.reshape(batch, -1, width), key, value, mask, float(scale))
            if found is not None:
                return found[:, None], None
        return own(module, query, key, value, attention_mask, *args, scaling=scaling, **named)

    ALL_ATTENTION_FUNCTIONS[name] = attention
    try:
        yield
    finally:  # without shadowing what others register later
        del ALL_ATTENTION_FUNCTIONS[name]
        if ALL_ATTENTION_FUNCTIONS.get(name) is not own:
            ALL_ATTENTION_FUNCTIONS[name] = own
