"""Tokenizes prompts: plain text, or chat messages through the tokenizer's template.

Invariant: a prompt that cannot be tokenized raises `ValueError`, regardless of what the tokenizer or template raised.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moepack.panics import contained

__all__ = ["Messages", "Prompt", "has_template", "positions", "prompt_ids"]

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat: each has a `role` (system, user, assistant) and `content`."""

Prompt = str | Messages


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(tokenizer.chat_template)


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Tokenize a prompt; a chat ends where the assistant's answer starts.

    Raises:
        ValueError: there are no tokens, the tokenizer has no chat template, the template rejects the messages or fails,
            or the tokenizer cannot read the text, for example because it contains a lone surrogate.
    """
    if isinstance(prompt, str):
        ids = _ids(tokenizer, prompt)
    elif has_template(tokenizer):
        ids = _chat_ids(tokenizer, prompt)
    else:
        raise ValueError("the model has no chat template: pass plain text to continue")
    if not ids:
        raise ValueError("the prompt has no tokens")
    return ids


def positions(model: Any) -> int | None:
    """Return the model's context length in tokens, prompt included; None if the configuration does not specify it."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _chat_ids(tokenizer: Any, messages: Messages) -> list[int]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # templates are programs and may raise anything
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the model's chat template rejects the messages: {said}") from error
    return _ids(tokenizer, text, add_special_tokens=False)


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Tokenize a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate at character {error.start}, which is not valid Unicode"
        ) from error
    try:
        with contained():
            ids: list[int] = tokenizer(text, **options).input_ids
    except Exception as error:
        raise ValueError(f"the tokenizer cannot read the text: {type(error).__name__}: {error}") from error
    return ids
