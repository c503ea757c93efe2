"""Decoding step by step: one call runs one token through all layers of a packed model.

`install` replaces the `forward` of a model's decoder and head. The replacement handles a call only if it is a plain
decoding step: evaluation mode, no gradients, and past tokens in a `DynamicCache`. On the CPU, the core runs one token
of one sequence with full attention, provided that `moepack.decoding.translation` recognizes every part of the model.
On a GPU, a recorded step is replayed (`moepack.decoding.graphs`), and prompts run in few launches
(`moepack.decoding.layers`). All other calls (hooks, outputs of layers, other models) go to transformers.

MOEPACK_DECODE or `set_decoding` controls it: "native" is the default, "transformers" disables it.
"""

import os
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from moepack.backends.cpu import views
from moepack.decoding.cache import Tokens
from moepack.decoding.families import decoder_of
from moepack.decoding.graphs import StepGraphs
from moepack.decoding.layers import Replacements
from moepack.decoding.narrow import is_narrow
from moepack.decoding.passes import Passes
from moepack.decoding.signature import Call, CallReader, cache_name
from moepack.decoding.translation import Translation, Unknown, is_known, require, window
from moepack.stores.module import PackedModule

__all__ = ["MODES", "VARIABLE", "decoding", "install", "passes_of", "set_decoding"]

MODES = ("native", "transformers")
VARIABLE = "MOEPACK_DECODE"
"""The environment variable that selects the decoding implementation."""

_chosen: str | None = None

_FLAGS = ("output_router_logits", "output_hidden_states", "output_attentions")
"""Arguments and settings that request more than the last hidden state."""

_OUTPUT_CACHE = cache_name(MoeModelOutputWithPast)
"""The output field that holds keys and values."""


def decoding() -> str:
    """Return the decoding implementation: the one set, else MOEPACK_DECODE, else "native".

    Raises:
        ValueError: MOEPACK_DECODE is not a valid choice.
    """
    return _chosen or _checked(os.environ.get(VARIABLE) or MODES[0])


def set_decoding(mode: str | None) -> None:
    """Select the decoding implementation for the process: "native", "transformers", or None for the default.

    Raises:
        ValueError: the choice is unknown.
    """
    global _chosen
    _chosen = None if mode is None else _checked(mode)


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"the decoding mode must be one of {', '.join(MODES)}, not {mode!r}")
    return mode


def install(model: nn.Module) -> None:
    """Make a model decode in the core or in CUDA graphs if it is supported; other models are not changed."""
    decoder = decoder_of(model)
    if not (is_known(decoder) or _is_on_gpu(decoder)) or "forward" in vars(decoder):
        return
    decoder.forward = DecoderForward(decoder)
    head = getattr(model, "lm_head", None)
    if decoder is not model and type(head) is nn.Linear and "forward" not in vars(head):
        head.forward = HeadForward(head)  # type: ignore[method-assign]


def _is_on_gpu(decoder: Any) -> bool:
    """Whether this is a decoder-only model whose packed bytes are all on a GPU."""
    if decoder.config.is_encoder_decoder:
        return False
    buffers = [
        buffer for module in decoder.modules() if isinstance(module, PackedModule) for buffer in module.buffers()
    ]
    return bool(buffers) and all(buffer.is_cuda for buffer in buffers)


class _Forward:
    """A replacement for a module's forward. A copy of the module gets its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._calls = CallReader(type(module).forward)
        self.__signature__ = self._calls.signature

    def module(self) -> Any:
        """The module that owns this object."""
        module = self._module()
        if module is None:
            raise ReferenceError("the module of this forward no longer exists")
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
        steps: decoding steps run by the core or by a replayed graph.
        declined: decoding steps left to transformers.
        reason: the unsupported feature of the latest declined step; empty if there was none.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.steps = self.declined = 0
        self.reason = ""
        self._translation: Translation | None = None
        self._graphs = StepGraphs()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder; same arguments and result as the class's forward."""
        call = None if torch.compiler.is_compiling() else self._calls.read(args, kwargs)
        output = self._decode(self.module(), call) if call is not None and _is_step(call) else None
        if output is None and call is not None and self._is_prompt(call):
            output = self._read(self.module(), call)
        if output is not None:
            return output
        with self._graphs.replaced(self.module()) if self._is_plain(call) else nullcontext():
            return self.original(*args, **kwargs)

    def _is_plain(self, call: Call | None) -> bool:
        """Whether the modules of a model on a GPU may run in few launches: nothing observes single modules."""
        if call is None or call.given is None or not call.given[1].is_cuda or self.module().training or _watcher():
            return False
        config = self.module().config
        return not any(call.others.get(name) or getattr(config, name, False) for name in _FLAGS)

    def _is_prompt(self, call: Call) -> bool:
        """Whether a call reads several tokens of each sequence on a GPU, without special positions."""
        if not self._is_plain(call) or call.given is None or call.given[0] != "input_ids" or _is_step(call):
            return False
        ids, uses_cache = call.given[1], self.module().config.use_cache if call.use_cache is None else call.use_cache
        others = {name: value for name, value in call.others.items() if name != "return_dict"}
        plain = ids.ndim == 2 and ids.numel() > 0 and bool(uses_cache) and not any(others.values())
        return plain and (call.cache is None or type(call.cache) is DynamicCache) and call.position_ids is None

    def _read(self, model: Any, call: Call) -> MoeModelOutputWithPast | None:
        """Read a prompt in recorded passes; return None to leave it to transformers."""
        cache = DynamicCache(config=model.config) if call.cache is None else call.cache
        try:
            require(not cache.offloading, "caches that are offloaded")
            state = self._graphs.read(model, self.original, _input(call)[1], cache, call.attention_mask)
        except Unknown:
            return None
        return MoeModelOutputWithPast(last_hidden_state=state, **{str(_OUTPUT_CACHE): cache})

    def _decode(self, model: Any, call: Call) -> MoeModelOutputWithPast | None:
        """Run a decoding step; return None to leave it to transformers."""
        try:
            watcher = _watcher()
            require(not watcher, watcher)
            require(not model.training, "models in training mode")
            require(type(call.cache) is DynamicCache, f"caches of the type {type(call.cache).__name__}")
            require(not call.cache.offloading, "caches that are offloaded")
            _require_plain(model.config, call)
            state = self._replayed(model, call) if _input(call)[1].is_cuda else self._stepped(model, call)
        except Unknown as reason:
            self.declined += 1
            self.reason = str(reason)
            return None
        self.steps += 1
        return MoeModelOutputWithPast(last_hidden_state=state, **{str(_OUTPUT_CACHE): call.cache})

    def _stepped(self, model: Any, call: Call) -> torch.Tensor:
        """Run a step in the core; return the hidden state `[1, 1, hidden]`."""
        require(_input(call)[1].shape[:2] == (1, 1), "several sequences at once")
        translation = self._ready(model)
        length = call.cache.get_seq_length()
        require(_sees_all(call.attention_mask, length + 1), "attention masks that hide tokens")
        position = _position(call.position_ids, length)
        hidden = model.embed_tokens(call.input_ids) if call.inputs_embeds is None else call.inputs_embeds
        require(
            hidden.dtype == translation.dtype and hidden.device.type == "cpu", "inputs with a different dtype or device"
        )
        layers = _taken(call.cache, translation, length)
        caches = [expected.arrays(layer) for expected, layer in zip(translation.caches, layers, strict=True)]
        state = views.decode(translation.decoder, hidden[0], position, caches)
        for expected, layer in zip(translation.caches, layers, strict=True):
            if isinstance(expected, Tokens):
                layer.advance()
        return state.view(hidden.shape)

    def _replayed(self, model: Any, call: Call) -> torch.Tensor:
        """Replay a recorded step on a GPU."""
        (name, given), mask, positions = _input(call), call.attention_mask, call.position_ids
        if is_narrow(call.cache) or not _has_whole_attention(model.config) or self._graphs.in_passes:
            require(name == "input_ids", "embeddings instead of tokens")
            return self._graphs.read(model, self.original, given, call.cache, mask, positions)
        seen = {"attention_mask": mask, "position_ids": positions}
        return self._graphs.step(model, self.original, {name: given}, call.cache, **seen)

    def _ready(self, model: Any) -> Translation:
        """The translation, rebuilt if the model changed."""
        if self._translation is None or not self._translation.holds():
            self._translation = None
            self._translation = Translation(model)
        return self._translation


def passes_of(model: Any) -> Passes | None:
    """The recorded passes of a model with its head (`moepack.decoding.passes`); None if it has none.

    The caller must not run them while another thread runs the model.
    """
    decoder, head = decoder_of(model), getattr(model, "lm_head", None)
    forward = vars(decoder).get("forward")
    if not isinstance(forward, DecoderForward) or not isinstance(head, nn.Module) or decoder is model:
        return None
    if decoding() != "native" or model.training or not _is_on_gpu(decoder):
        return None
    try:
        return Passes(decoder, forward.original, Replacements(decoder), head)
    except Unknown:
        return None


FEW = 16
"""The most tokens for which the core computes a dense head: 8 tokens of bfloat16 run 2.3 times as fast as with torch on
Zen 3 (AVX2). For more tokens, torch uses tile instructions if the processor has them.
"""


class HeadForward(_Forward):
    """The forward of a dense head: the core multiplies few tokens, because its worker threads are still awake."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._matrix: tuple[int, Any] | None = None

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Compute logits; same arguments and result as the class's forward."""
        if torch.compiler.is_compiling():
            traced: torch.Tensor = self.original(input)
            return traced
        head = self.module()
        weight = head.weight
        if (
            not 1 <= input.shape[:-1].numel() <= FEW
            or _watcher()
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


def _watcher() -> str:
    """The reason why steps must currently run in torch; empty if there is none."""
    if decoding() != "native":
        return f'steps while {VARIABLE} or set_decoding asks for "{decoding()}"'
    if torch.is_grad_enabled():
        return "steps that record gradients: torch.inference_mode() records none"
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "steps under autocast"
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return "steps that are traced or compiled"
    return ""


def _has_whole_attention(config: Any) -> bool:
    """Whether every layer has full attention."""
    try:
        return all(window(config, layer) is None for layer in range(config.num_hidden_layers))
    except Unknown:
        return False


def _input(call: Call) -> tuple[str, torch.Tensor]:
    """The single input of a step, and its name."""
    given = call.given
    require(given is not None, "calls without exactly one of input_ids and inputs_embeds")
    assert given is not None
    return given


def _is_step(call: Call) -> bool:
    """Whether a call extends sequences by one token each; the start of a prompt does not count."""
    if call.given is None or call.given[1].ndim < 2 or call.given[1].shape[1] != 1 or call.cache is None:
        return False
    return type(call.cache) is not DynamicCache or call.cache.get_seq_length() > 0


def _require_plain(config: Any, call: Call) -> None:
    """Raise `Unknown` unless a call requests only the last hidden state and the cache."""
    require(bool(config.use_cache if call.use_cache is None else call.use_cache), "calls without use_cache")
    wanted = {**call.others, "return_dict": not call.others.get("return_dict", True)}
    known = (*_FLAGS, "return_dict")
    for name in [name for name, value in wanted.items() if name not in known or value]:
        raise Unknown(f"calls with {name}")
    for name in _FLAGS:
        require(not getattr(config, name, False), f"models whose configuration sets {name}")
    require(getattr(config, "return_dict", True) is not False, "models that return tuples")
    attention = config._attn_implementation
    require(attention in ("eager", "sdpa"), f"the attention implementation {attention!r}")


def _sees_all(mask: Any, tokens: int) -> bool:
    """Whether an attention mask hides no token."""
    if mask is None:
        return True
    return isinstance(mask, torch.Tensor) and mask.shape == (1, tokens) and bool(mask.all())


def _position(positions: torch.Tensor | None, length: int) -> int:
    """The position of the token.

    Multimodal models have three rows of positions, which differ within images. Some put a row of token indices first
    (Qwen3.5).

    Raises:
        Unknown: the token has several positions.
    """
    if positions is None:
        return length
    found = (positions[1:] if positions.shape == (4, 1, 1) else positions).reshape(-1)
    require(found.numel() in (1, 3) and bool((found == found[0]).all()) and int(found[0]) >= 0, "several positions")
    return int(found[0])


def _taken(cache: DynamicCache, translation: Translation, length: int) -> list[Any]:
    """Convert the layers of a cache to ones that grow in place.

    Raises:
        Unknown: the layers do not match the translation.
    """
    require(len(cache.layers) == len(translation.caches), "caches with a different number of layers")
    layers = [expected.taken(layer, length) for expected, layer in zip(translation.caches, cache.layers, strict=True)]
    require(all(layer is not None for layer in layers), "caches with unexpected contents")
    cache.layers[:] = layers
    return layers
