"""Validates token ids on their way into a model: each must be a row index of its embedding.

A tokenizer may have more tokens than the embedding has rows, because tokens were added or it belongs to another model.
Unchecked, torch raises an IndexError on the CPU. On a GPU a kernel fails, and every later call of the process with it.

`require_known` checks tokens where text or a request is tokenized, and names the token in the tokenizer's spelling.
`watch` makes a model check its own inputs, so no caller can bypass the check.
`require_head` checks that a model has a language-model head.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch

from moepack.errors import TokenError, UnsupportedModelError

__all__ = ["first_unknown", "naming", "require_head", "require_known", "unknown", "vocabulary_of", "watch"]

_INPUTS = ("input_ids", "decoder_input_ids")
_IGNORED = -100
"""The label of positions without loss."""


def vocabulary_of(model: Any) -> int | None:
    """Return the number of rows of a model's input embedding; None if it is unknown."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    rows = getattr(embedding, "num_embeddings", None)
    return rows if isinstance(rows, int) and rows > 0 else None


def require_head(model: Any) -> None:
    """Raise if a model has no language-model head.

    Raises:
        UnsupportedModelError: its class has no such head.
    """
    if not getattr(model, "can_generate", lambda: True)():
        raise UnsupportedModelError(f"{type(model).__name__} has no language-model head, so it cannot predict tokens")


def first_unknown(ids: Sequence[int] | torch.Tensor, rows: int) -> int | None:
    """Return the lowest id if it is negative, else the highest if it is not below `rows`, else None."""
    if isinstance(ids, torch.Tensor):
        low, high = map(int, torch.aminmax(ids)) if ids.numel() else (0, 0)
    else:
        low, high = min(ids, default=0), max(ids, default=0)
    if low < 0:
        return low
    return high if high >= rows else None


def unknown(token: int, rows: int, tokenizer: Any = None) -> str:
    """Return a message about a token outside the vocabulary."""
    spelled = _spelled(token, tokenizer)
    name = "" if spelled is None else f", {spelled!r} in the tokenizer"
    return f"token {token} is outside the model's vocabulary of {rows} rows{name}: ids must be between 0 and {rows - 1}"


def require_known(
    ids: Sequence[int] | torch.Tensor,
    rows: int | None,
    tokenizer: Any = None,
    file: str | PathLike[str] | None = None,
) -> None:
    """Raise if a token is not a row of the embedding.

    Args:
        ids: token ids, of any shape.
        rows: rows of the embedding (`vocabulary_of`); None disables the check.
        tokenizer: the tokenizer that produced them, for the token's spelling.
        file: the file that they were read from.

    Raises:
        TokenError: a token is out of range; the message has its id, its spelling and the number of rows.
    """
    if rows is not None and (token := first_unknown(ids, rows)) is not None:
        raise _error(token, rows, tokenizer, file)


@contextmanager
def naming(tokenizer: Any, file: str | PathLike[str] | None = None) -> Iterator[None]:
    """Add the token's spelling to errors of a model, which does not know its tokenizer."""
    try:
        yield
    except TokenError as error:
        if error.token is None:
            raise
        raise _error(error.token, error.rows, tokenizer, error.file or file) from error


def _error(token: int, rows: int, tokenizer: Any, file: str | PathLike[str] | None) -> TokenError:
    error = TokenError(unknown(token, rows, tokenizer), file=file)
    error.token, error.rows = token, rows
    return error


def watch(model: Any) -> None:
    """Make a model reject out-of-range tokens in every call with a `TokenError`; idempotent."""
    if vocabulary_of(model) is not None and _check not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check, with_kwargs=True)


def _check(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the tokens of a call; used as a forward pre-hook.

    Images, audio and video appear in a prompt as placeholder tokens that the model replaces before lookup, so calls
    with media are not checked.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or _has_media(kwargs):
        return
    given = [*args[:1], *(kwargs.get(name) for name in _INPUTS)]
    if model.config.is_encoder_decoder and type(labels := kwargs.get("labels")) is torch.Tensor:
        given.append(labels.masked_fill(labels == _IGNORED, 0))
    rows = vocabulary_of(model)
    for ids in given:
        if type(ids) is torch.Tensor and not ids.is_floating_point() and not _is_chosen(ids):
            require_known(ids, rows)


def _is_chosen(ids: torch.Tensor) -> bool:
    """Whether tokens are single ones on a device: the model chose them, and reading them would synchronize."""
    return ids.is_meta or (ids.device.type != "cpu" and ids.shape[-1] == 1)


def _has_media(kwargs: Mapping[str, Any]) -> bool:
    return any(value is not None and ("pixel" in name or "features" in name) for name, value in kwargs.items())


def _spelled(token: int, tokenizer: Any) -> str | None:
    """A tokenizer's spelling of a token; None if it has none."""
    spell = getattr(tokenizer, "convert_ids_to_tokens", None)
    try:
        spelled = None if spell is None or token < 0 else spell(token)
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        return None
    return spelled if isinstance(spelled, str) else None
