"""Opens models for evaluation, from directories, Hub ids or loaded models."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch

from moepack.checkpoint.resolve import resolve_model
from moepack.decoding.finite import are_finite, non_finite
from moepack.decoding.vocabulary import require_head
from moepack.integrations.loading import is_packed, open_tokenizer, open_with
from moepack.integrations.options import DTYPES, LoadOptions

__all__ = ["Progress", "Source", "dtype_of", "is_loaded", "open_source", "run", "tokenizer_of"]

Model = Any
Source = str | PathLike[str] | Model
Progress = Callable[[int, int, float], None]


def is_loaded(source: Source) -> bool:
    """Return whether the source is a loaded model."""
    return not isinstance(source, str | PathLike)


def open_source(source: Source, options: LoadOptions) -> Model:
    """Return the model, loading it if necessary.

    Raises:
        UnsupportedModelError: the model has no head that predicts tokens.
        MoepackError: as for `open_model`.
    """
    model = source if is_loaded(source) else open_with(source, options)
    require_head(model)
    return model


def tokenizer_of(source: Source, tokenizer: Any) -> Any:
    """Return the given tokenizer, or that of the model's directory.

    Raises:
        LoadError: the directory has no model or no tokenizer.
        ValueError: the model is loaded and `tokenizer` is None.
    """
    if tokenizer is not None:
        return tokenizer
    if is_loaded(source):
        raise ValueError("a loaded model needs its tokenizer: evaluate(model, text, tokenizer=...)")
    directory = resolve_model(source)
    is_packed(directory)  # gives a clearer error than the tokenizer's loader
    return open_tokenizer(directory)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype | None:
    """Return the dtype of a name; None for "auto", the checkpoint's dtype."""
    return DTYPES.get(dtype) if isinstance(dtype, str) else dtype


def run(model: Model, inputs: dict[str, Any]) -> torch.Tensor:
    """Return the logits of a batch, on the model's device.

    Raises:
        NonFiniteError: the logits are not finite; the message names the layer.
    """
    moved = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    logits: torch.Tensor = model(**moved).logits
    if not are_finite(logits):
        raise non_finite(model, moved)
    return logits
