"""Decoding step by step: one token through all layers of a packed model in one call, instead of operation by operation.

`install` gives the decoder and the head of a model a `forward` of their own. It takes a call only if it is just a
decoding step, in evaluation mode without gradients, behind tokens that a `DynamicCache` holds. On the CPU the core
takes one token of one sequence, which sees all before it, if `moepack.runtime.plan` knows the model through and
through. On a GPU a recorded step is replayed (`moepack.runtime.graphs`). Every other call (prompts, hooks, outputs of
layers, other models) is transformers' own.

The environment variable MOEPACK_DECODE or `set_decoding` turns it off: "native" is the default, "transformers" leaves
every call to transformers.
"""

import inspect
import os
import weakref
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from moepack.runtime.backends.cpu import views
from moepack.runtime.cache import Tokens
from moepack.runtime.families import decoder_of
from moepack.runtime.graphs import StepGraphs
from moepack.runtime.packed import PackedModule
from moepack.runtime.plan import Plan, Unknown, is_known, window

__all__ = ["MODES", "VARIABLE", "decoding", "install", "set_decoding"]

MODES = ("native", "transformers")
VARIABLE = "MOEPACK_DECODE"
"""The environment variable that chooses what decodes."""

_chosen: str | None = None

_FLAGS = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Arguments and settings that ask for more than the last hidden state."""


def decoding() -> str:
    """Return what decodes: what was set, else what MOEPACK_DECODE says, else "native".

    Raises:
        ValueError: MOEPACK_DECODE is nothing of the kind.
    """
    return _chosen or _checked(os.environ.get(VARIABLE) or MODES[0])


def set_decoding(mode: str | None) -> None:
    """Choose what decodes, for the whole process: "native", "transformers", or None for the default.

    Raises:
        ValueError: there is no such choice.
    """
    global _chosen
    _chosen = None if mode is None else _checked(mode)


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"decoding is one of {', '.join(MODES)}, not {mode!r}")
    return mode


def install(model: nn.Module) -> None:
    """Let a model decode in the core, or in CUDA graphs, wherever it can; other models stay as they are."""
    decoder = decoder_of(model)
    if not (is_known(decoder) or _is_on_gpu(decoder)) or "forward" in vars(decoder):
        return
    decoder.forward = DecoderForward(decoder)
    head = getattr(model, "lm_head", None)
    if decoder is not model and type(head) is nn.Linear and "forward" not in vars(head):
        head.forward = HeadForward(head)  # type: ignore[method-assign]


def _is_on_gpu(decoder: Any) -> bool:
    """Whether it is a decoder, without an encoder, whose packed bytes are on a GPU."""
    if decoder.config.is_encoder_decoder:
        return False
    buffers = [
        buffer for module in decoder.modules() if isinstance(module, PackedModule) for buffer in module.buffers()
    ]
    return bool(buffers) and all(buffer.is_cuda for buffer in buffers)


class _Forward:
    """A module's forward, called in place of its class's. A copy of the module has one of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        forward = inspect.signature(type(module).forward)
        self.__signature__ = forward.replace(parameters=list(forward.parameters.values())[1:])

    def module(self) -> Any:
        """The module, which owns this object."""
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward is gone")
        return module

    def original(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the module's class."""
        module = self.module()
        return type(module).forward(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Forward":
        module = self.module()
        return type(self)(memo.get(id(module), module))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module(),)


class DecoderForward(_Forward):
    """The forward of a decoder without its head.

    Attributes:
        steps: calls that the core, or a replayed graph, has taken.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.steps = 0
        self._plan: Plan | None = None
        self._graphs = StepGraphs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the class's forward."""
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        output = None if args or not _is_free() else self._decode(self.module(), **kwargs)
        return self.original(*args, **kwargs) if output is None else output

    def _decode(
        self,
        model: Any,
        *,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cache_position: torch.Tensor | None = None,
        **others: Any,
    ) -> MoeModelOutputWithPast | None:
        """A decoding step; None where this is none that is known. Older transformers repeat the position."""
        if model.training or type(past_key_values) is not DynamicCache or past_key_values.offloading:
            return None
        if not _is_plain(model.config, use_cache, others) or (input_ids is None) == (inputs_embeds is None):
            return None
        given = input_ids if inputs_embeds is None else inputs_embeds
        if given is not None and given.is_cuda:
            name = "input_ids" if inputs_embeds is None else "inputs_embeds"
            seen = {"attention_mask": attention_mask, "position_ids": position_ids}
            return self._replay(model, {name: given}, past_key_values, seen)
        plan = self._ready(model) if given is not None and given.shape[:2] == (1, 1) else None
        length = past_key_values.get_seq_length()
        if plan is None or length == 0 or not _sees_all(attention_mask, length + 1):
            return None
        position = _position(position_ids, length)
        layers = _taken(past_key_values, plan, length)
        if position is None or layers is None:
            return None
        hidden = model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if hidden.dtype != plan.dtype or hidden.device.type != "cpu":
            return None
        caches = [expected.arrays(layer) for expected, layer in zip(plan.caches, layers, strict=True)]
        state = views.decode(plan.decoder, hidden[0], position, caches)
        for expected, layer in zip(plan.caches, layers, strict=True):
            if isinstance(expected, Tokens):
                layer.advance()
        self.steps += 1
        return MoeModelOutputWithPast(last_hidden_state=state.view(hidden.shape), past_key_values=past_key_values)

    def _replay(
        self, model: Any, given: dict[str, torch.Tensor], cache: DynamicCache, seen: dict[str, Any]
    ) -> MoeModelOutputWithPast | None:
        """A decoding step on a GPU; None where this is none that can be replayed."""
        ((_, tensor),) = given.items()
        if tensor.shape[1] != 1 or not _has_whole_attention(model.config):
            return None
        state = self._graphs.step(model, self.original, given, cache, **seen)
        if state is None:
            return None
        self.steps += 1
        return MoeModelOutputWithPast(last_hidden_state=state, past_key_values=cache)

    def _ready(self, model: Any) -> Plan | None:
        """The plan, made anew where the model has changed."""
        if self._plan is None or not self._plan.holds():
            try:
                self._plan = Plan(model)
            except Unknown:
                self._plan = None
        return self._plan


FEW = 16
"""Tokens that a dense head takes in the core: 8 of bfloat16 2.3 times as fast as torch on Zen 3 (AVX2). For many tokens
torch has the instructions for tiles, where the processor has them.
"""


class HeadForward(_Forward):
    """The forward of a dense head: few tokens are multiplied by the core, whose threads are awake."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._matrix: tuple[int, Any] | None = None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """As the class's forward."""
        if torch.compiler.is_compiling():
            traced: torch.Tensor = self.original(input)
            return traced
        head = self.module()
        weight = head.weight
        if (
            not 1 <= input.shape[:-1].numel() <= FEW
            or not _is_free()
            or head.bias is not None
            or weight.dtype not in views.FLOATS
            or input.dtype != weight.dtype
            or {input.device.type, weight.device.type} != {"cpu"}
            or not weight.is_contiguous()
        ):
            output: torch.Tensor = self.original(input)
            return output
        if self._matrix is None or self._matrix[0] != weight.data_ptr():
            self._matrix = weight.data_ptr(), views.dense_matrix(weight)
        product = views.dense_product(self._matrix[1], input.reshape(-1, input.shape[-1]))
        return product.to(input.dtype).view(*input.shape[:-1], -1)


def _is_free() -> bool:
    """Whether nothing watches what torch computes, and the choice is the core."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or decoding() != "native"
    )


def _has_whole_attention(config: Any) -> bool:
    """Whether every token sees all before it."""
    try:
        return all(window(config, layer) is None for layer in range(config.num_hidden_layers))
    except Unknown:
        return False


def _is_plain(config: Any, use_cache: bool | None, others: dict[str, Any]) -> bool:
    """Whether a call asks for the last hidden state and the cache alone."""
    wanted = {**others, "return_dict": not others.get("return_dict", True)}
    cached = config.use_cache if use_cache is None else use_cache
    return (
        bool(cached)
        and all(name in (*_FLAGS, "return_dict") for name in others)
        and not any(wanted.values())
        and not any(getattr(config, name, False) for name in _FLAGS)
        and getattr(config, "return_dict", True) is not False
        and config._attn_implementation in ("eager", "sdpa")
    )


def _sees_all(mask: Any, tokens: int) -> bool:
    """Whether an attention mask hides none of the tokens."""
    if mask is None:
        return True
    return isinstance(mask, torch.Tensor) and mask.shape == (1, tokens) and bool(mask.all())


def _position(positions: torch.Tensor | None, length: int) -> int | None:
    """The position of the token; None where it has several.

    Models of images and text have three rows of positions, which differ within images, and may have one of the token's
    number in front of them (Qwen3.5).
    """
    if positions is None:
        return length
    found = positions[1:] if positions.shape == (4, 1, 1) else positions
    position = (
        int(found.reshape(-1)[0]) if found.numel() in (1, 3) and bool((found == found.reshape(-1)[0]).all()) else -1
    )
    return position if position >= 0 else None


def _taken(cache: DynamicCache, plan: Plan, length: int) -> list[Any] | None:
    """The layers of a cache, made to grow in place; None where they do not hold what the core expects."""
    if len(cache.layers) != len(plan.caches):
        return None
    layers = [expected.taken(layer, length) for expected, layer in zip(plan.caches, cache.layers, strict=True)]
    if any(layer is None for layer in layers):
        return None
    cache.layers[:] = layers
    return layers
