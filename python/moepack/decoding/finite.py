"""Checks that logits are finite, and finds the layer where a model starts to produce non-finite values.

A float16 checkpoint whose experts overflow yields NaN logits for every token. Greedy decoding then returns token 0
forever, and sampling fails inside torch. Every consumer of logits therefore calls `are_finite`, which costs one maximum
per row. If the check fails, `non_finite` runs the same tokens again with hooks on all modules and names the first
module with finite inputs and a non-finite output.

Logits of -inf are valid if the row has other values: models mask parts of their vocabulary this way.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from moepack.decoding.prefix import new_cache
from moepack.decoding.signature import cache_argument
from moepack.errors import NonFiniteError

__all__ = ["advice", "are_finite", "non_finite", "non_finite_in", "watching"]

CHUNK = 1024
"""Tokens per chunk when tokens are run again."""


def are_finite(logits: torch.Tensor) -> bool:
    """Whether a token can be chosen from each row of logits [..., V]: no NaN, no +inf, and not all -inf."""
    return bool(logits.amax(-1).isfinite().all())


def non_finite(model: Any, inputs: Mapping[str, Any], what: str = "logits") -> NonFiniteError:
    """Build the error for non-finite logits; it names the layer where they first appear.

    Args:
        model: the model; its state is not changed.
        inputs: arguments of its forward without a cache: `input_ids` [B, L] and additional encoder-decoder inputs.
        what: the name of the non-finite value in the message.
    """

    def run() -> None:
        _read(model, {name: _moved(value, model.device) for name, value in inputs.items()})

    return non_finite_in(model, run, model.dtype, what)


def non_finite_in(model: Any, run: Callable[[], Any], dtype: torch.dtype, what: str = "logits") -> NonFiniteError:
    """Build the error for non-finite logits of any computation; it names the layer where they first appear.

    Args:
        model: the model; its state is not changed.
        run: computes the logits again.
        dtype: the dtype of the computation.
        what: the name of the non-finite value in the message.
    """
    place = _place(model, run)
    where = (
        "the layer cannot be identified, because a second run over the same tokens is finite"
        if place is None
        else f"NaN or infinity first appears in '{place}'"
    )
    return NonFiniteError(f"the model's {what} are not finite: {where}; {advice(dtype)}")


def advice(dtype: torch.dtype) -> str:
    """Return a suggestion for a model that produces non-finite values in the given dtype."""
    if dtype == torch.float16:
        return "float16 ends at 65504: try --dtype bfloat16 (dtype='bfloat16' in Python)"
    if dtype == torch.bfloat16:
        return "try --dtype float32, and `moepack verify` to find damaged files"
    return "the weights may be damaged: try `moepack verify`, or check the source checkpoint"


@contextmanager
def watching(model: Any) -> Iterator[None]:
    """Make every call of a model raise `NonFiniteError` if its logits are not finite."""

    def check(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        logits, mask = output.logits, kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.shape == logits.shape[:2]:
            logits = logits[mask.to(logits.device, torch.bool)]  # outputs at padding are unused
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
    """Raised to stop the forward pass once the module is found."""


def _place(model: Any, run: Callable[[], Any]) -> str | None:
    """The path of the first module with finite inputs and a non-finite output; None if all outputs are finite."""
    config = model.config.get_text_config(decoder=True)
    width = int(getattr(config, "hidden_size", 0))
    later: list[str] = []
    hooks = []

    def note(path: str, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        if _are_sound(output, width):
            return
        # Attention masks legitimately contain -inf.
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
    """Run the model on tokens; long inputs run in chunks, up to the first hit."""
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
    """Whether no tensor in a structure has NaN or infinity.

    Router scores and masks may contain -inf. Hidden states, identified by a last dimension of `width`, may not.
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
