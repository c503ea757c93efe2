"""Prompts as tokens: plain text, or the messages of a chat through the tokenizer's template.

Invariant: a prompt that does not become tokens raises a `ValueError`, whatever the tokenizer or its template raised.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moepack.runtime.panics import contained

__all__ = ["Messages", "Prompt", "has_template", "positions", "prompt_ids"]

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat: each has a `role` (system, user, assistant) and a `content`."""

Prompt = str | Messages


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer knows how a chat is written."""
    return bool(tokenizer.chat_template)


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt; a chat ends where the assistant's answer begins.

    Raises:
        ValueError: there are none, or the tokenizer has no template for a chat, or the template refuses the messages
            or fails, or the tokenizer cannot read the text, for instance because it has a lone surrogate.
    """
    if isinstance(prompt, str):
        ids = _ids(tokenizer, prompt)
    elif has_template(tokenizer):
        ids = _chat_ids(tokenizer, prompt)
    else:
        raise ValueError("the model has no chat template: give it plain text to continue")
    if not ids:
        raise ValueError("the prompt has no tokens")
    return ids


def positions(model: Any) -> int | None:
    """Return how many tokens, prompt included, the model was made for; None where its configuration does not say."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def _chat_ids(tokenizer: Any, messages: Messages) -> list[int]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program, which may raise anything
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the model's chat template refuses the messages: {said}") from error
    return _ids(tokenizer, text, add_special_tokens=False)


def _ids(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """The tokens of a text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate at character {error.start}: that is no Unicode text"
        ) from error
    try:
        with contained():
            ids: list[int] = tokenizer(text, **options).input_ids
    except Exception as error:
        raise ValueError(f"the tokenizer cannot read the text: {type(error).__name__}: {error}") from error
    return ids
