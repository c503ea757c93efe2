"""Logits that must be numbers, and the layer where a model ceases to compute numbers.

A float16 checkpoint whose experts overflow gives NaN for every token. The likeliest of them is then token 0, for ever;
drawing among them fails in torch. So whoever takes logits from a model asks `are_finite`, which costs one maximum a
row. Where it says no, `non_finite` reads the same tokens again with hooks on all modules and names the first module
whose output is not finite while its inputs are.

Logits of -inf are sound as long as a row has others: models mask parts of their vocabulary so.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from moepack.errors import NonFiniteError
from moepack.runtime.calls import cache_argument
from moepack.runtime.prefix import new_cache

__all__ = ["advice", "are_finite", "non_finite", "non_finite_in", "watching"]

CHUNK = 1024
"""Tokens that are read again at a time."""


def are_finite(logits: torch.Tensor) -> bool:
    """Whether a token can be chosen from each row of logits [..., V]: no NaN, no +inf, and not -inf alone."""
    return bool(logits.amax(-1).isfinite().all())


def non_finite(model: Any, inputs: Mapping[str, Any], what: str = "logits") -> NonFiniteError:
    """Return the error of a model whose logits are not finite, which names the layer.

    Args:
        model: the model; its state is left as it is.
        inputs: of its forward, without a cache: `input_ids` [B, L] and what an encoder-decoder takes beside.
        what: is not finite.
    """

    def run() -> None:
        _read(model, {name: _moved(value, model.device) for name, value in inputs.items()})

    return non_finite_in(model, run, model.dtype, what)


def non_finite_in(model: Any, run: Callable[[], Any], dtype: torch.dtype, what: str = "logits") -> NonFiniteError:
    """Return the error of a model whose logits are not finite, which names the layer.

    Args:
        model: the model; its state is left as it is.
        run: computes the logits once more.
        dtype: in which it computes them.
        what: is not finite.
    """
    place = _place(model, run)
    where = (
        "the layer cannot be told, for reading the same tokens again gives finite ones"
        if place is None
        else f"NaN or infinity first appears in '{place}'"
    )
    return NonFiniteError(f"the model's {what} are not finite: {where}; {advice(dtype)}")


def advice(dtype: torch.dtype) -> str:
    """Return what to try where a model of a dtype computes what is not finite."""
    if dtype == torch.float16:
        return "float16 ends at 65504: try --dtype bfloat16 (dtype='bfloat16' in Python)"
    if dtype == torch.bfloat16:
        return "try --dtype float32, and `moepack verify` for damaged files"
    return "the weights may be damaged: try `moepack verify`, or the checkpoint that they come from"


@contextmanager
def watching(model: Any) -> Iterator[None]:
    """Let every call of a model raise a `NonFiniteError` where its logits are not finite."""

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        logits, mask = output.logits, kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == logits.shape[:2]:
            logits = logits[mask.to(logits.device, torch.bool)]  # what padding computes is not used
        if not are_finite(logits):
            given = {"input_ids": args[0]} if args else {}
            names = ("input_ids", "attention_mask", "decoder_input_ids", "labels")
            given |= {name: kwargs[name] for name in names if kwargs.get(name) is not None}
            hook.remove()
            raise non_finite(model, given)

    hook = model.register_forward_hook(check, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class _Found(Exception):
    """The module that is looked for has run."""


def _place(model: Any, run: Callable[[], Any]) -> str | None:
    """The path of the first module whose output is not finite while its inputs are; None where all are finite."""
    config = model.config.get_text_config(decoder=True)
    width = int(getattr(config, "hidden_size", 0))
    later: list[str] = []
    hooks = []

    def note(path: str, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if _are_sound(output, width):
            return
        # Masks of attention are -inf, and may be so on purpose.
        given = [*args, *(value for name, value in kwargs.items() if "mask" not in name)]
        later.append(path)
        if _are_sound(given, width):
            later[:] = [path]
            raise _Found

    for path, module in model.named_modules():
        if path:
            hook = lambda _, args, kwargs, output, path=path: note(path, args, kwargs, output)  # noqa: E731
            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.inference_mode(), suppress(_Found):
            run()
    finally:
        for handle in hooks:
            handle.remove()
    return later[0] if later else None


def _read(model: Any, inputs: dict[str, Any]) -> None:
    """Read tokens; long texts in parts, as far as something is found."""
    ids = inputs["input_ids"]
    if model.config.is_encoder_decoder or len(ids) > 1 or ids.shape[1] <= CHUNK:
        model(**{"use_cache": False, **inputs})
        return
    cache = new_cache(model)
    for part in ids.split(CHUNK, dim=1):
        model(input_ids=part, **cache_argument(model, cache), use_cache=True)


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _are_sound(values: Any, width: int) -> bool:
    """Whether no tensor of a structure has NaN or infinity.

    Scores of routers and masks may be -inf on purpose, hidden states, which have `width` features, may not.
    """
    if isinstance(values, torch.Tensor):
        if not values.is_floating_point() or values.numel() == 0:
            return True
        if values.shape[-1:] == (width,):
            return bool(values.isfinite().all())
        return bool(values.max().isfinite() | values.max().isneginf())
    if isinstance(values, Mapping):
        return all(_are_sound(value, width) for value in values.values())
    if isinstance(values, list | tuple):
        return all(_are_sound(value, width) for value in values)
    return True
