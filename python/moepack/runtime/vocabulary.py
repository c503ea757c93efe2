"""Tokens on their way into a model: each must be the number of a row of its embedding.

A tokenizer may know more tokens than the embedding has rows: added tokens, or the tokenizer of another model. Without a
check torch raises an IndexError on the CPU; on a GPU a kernel fails, and with it every later call of the process.

`require_known` checks tokens where text or a request becomes tokens, and names the token in the tokenizer's spelling.
`watch` makes a model check what it is called with, so that no caller can go around the check.
`require_head` checks that tokens come out of it at all.
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
"""The label of positions that have no loss."""


def vocabulary_of(model: Any) -> int | None:
    """Return the number of rows of a model's input embedding; None where the model does not say."""
    try:
        embedding = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    rows = getattr(embedding, "num_embeddings", None)
    return rows if isinstance(rows, int) and rows > 0 else None


def require_head(model: Any) -> None:
    """Raise where a model predicts no tokens.

    Raises:
        UnsupportedModelError: its class has no head that does.
    """
    if not getattr(model, "can_generate", lambda: True)():
        raise UnsupportedModelError(f"{type(model).__name__} predicts no tokens: it is a model without such a head")


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
    """Return the sentence that says which token is not in the vocabulary."""
    spelled = _spelled(token, tokenizer)
    name = "" if spelled is None else f", {spelled!r} in the tokenizer"
    return f"token {token} is out of the model's vocabulary of {rows} rows{name}: tokens are between 0 and {rows - 1}"


def require_known(
    ids: Sequence[int] | torch.Tensor,
    rows: int | None,
    tokenizer: Any = None,
    file: str | PathLike[str] | None = None,
) -> None:
    """Raise where a token is not a row of the embedding.

    Args:
        ids: tokens, of any shape.
        rows: of the embedding (`vocabulary_of`); None checks nothing.
        tokenizer: that made them, which knows how the token is spelled.
        file: that they were read from.

    Raises:
        TokenError: there is such a token; the message has its id, its spelling and the number of rows.
    """
    if rows is not None and (token := first_unknown(ids, rows)) is not None:
        raise _error(token, rows, tokenizer, file)


@contextmanager
def naming(tokenizer: Any, file: str | PathLike[str] | None = None) -> Iterator[None]:
    """Let errors of a model, which does not know its tokenizer, say how the token is spelled."""
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
    """Let a model refuse unknown tokens in every call, with a `TokenError`; again is a no-op."""
    if vocabulary_of(model) is not None and _check not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_check, with_kwargs=True)


def _check(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Check the tokens of a call; a hook of the model.

    Images, sound and video stand in a prompt as tokens that the model replaces before it looks them up, so calls with
    them are left to the model.
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
    """Whether tokens are single ones on a device: the model has chosen them, and a look would wait for the device."""
    return ids.is_meta or (ids.device.type != "cpu" and ids.shape[-1] == 1)


def _has_media(kwargs: Mapping[str, Any]) -> bool:
    return any(value is not None and ("pixel" in name or "features" in name) for name, value in kwargs.items())


def _spelled(token: int, tokenizer: Any) -> str | None:
    """How a tokenizer spells a token; None where it cannot say."""
    spell = getattr(tokenizer, "convert_ids_to_tokens", None)
    try:
        spelled = None if spell is None or token < 0 else spell(token)
    except (IndexError, KeyError, OverflowError, TypeError, ValueError):
        return None
    return spelled if isinstance(spelled, str) else None
