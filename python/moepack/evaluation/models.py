"""Models to be evaluated: given as directories, ids of the hub, or loaded."""

from collections.abc import Callable
from os import PathLike
from typing import Any

import torch

from moepack.checkpoint.resolve import resolve_model
from moepack.integrations.loading import DTYPES, is_packed, open_model, open_tokenizer
from moepack.runtime.finite import are_finite, non_finite
from moepack.runtime.vocabulary import require_head

__all__ = ["Progress", "Source", "dtype_of", "is_loaded", "open_source", "run", "tokenizer_of"]

Model = Any
Source = str | PathLike[str] | Model
Progress = Callable[[int, int, float], None]


def is_loaded(source: Source) -> bool:
    """Say whether it is a loaded model."""
    return not isinstance(source, str | PathLike)


def open_source(source: Source, dtype: torch.dtype | str, **loading: Any) -> Model:
    """The model itself, loaded if it is not.

    Raises:
        UnsupportedModelError: it predicts no tokens.
        MoepackError: as of `open_model`.
    """
    model = source if is_loaded(source) else open_model(source, dtype, **loading)
    require_head(model)
    return model


def tokenizer_of(source: Source, tokenizer: Any) -> Any:
    """The tokenizer that was given, or that of the model's directory.

    Raises:
        LoadError: there is no model, or no tokenizer with it.
        ValueError: the model is loaded, and no tokenizer was given.
    """
    if tokenizer is not None:
        return tokenizer
    if is_loaded(source):
        raise ValueError("a loaded model needs its tokenizer: evaluate(model, text, tokenizer=...)")
    directory = resolve_model(source)
    is_packed(directory)  # refuses what is no model in fewer words than the tokenizer's loader
    return open_tokenizer(directory)


def dtype_of(dtype: torch.dtype | str) -> torch.dtype | None:
    """The dtype that a name stands for; None for "auto", the checkpoint's."""
    return DTYPES.get(dtype) if isinstance(dtype, str) else dtype


def run(model: Model, inputs: dict[str, Any]) -> torch.Tensor:
    """Logits of a batch, on the model's device.

    Raises:
        NonFiniteError: they are not finite; the message names the layer.
    """
    moved = {
        name: value.to(model.device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
    }
    logits: torch.Tensor = model(**moved).logits
    if not are_finite(logits):
        raise non_finite(model, moved)
    return logits
