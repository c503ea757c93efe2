"""Tokenizes prompts: plain text, or chat messages through the tokenizer's template.

Text inside messages never becomes a control token: only the template writes those. Assistant messages may contain the
model's own marks, such as `</think>`, because templates look for them; special tokens are text there, too.

Invariant: a prompt that cannot be tokenized raises `ValueError`, regardless of what the tokenizer or template raised.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from moepack.panics import contained

__all__ = [
    "Chat",
    "Messages",
    "Prompt",
    "chat_prompt",
    "has_template",
    "has_variable",
    "positions",
    "prompt_ids",
    "rendered",
    "reserved",
    "template",
    "text_ids",
]

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat: each has a `role` (system, user, assistant, tool) and `content`."""


@dataclass(frozen=True)
class Chat:
    """Messages and the arguments of the chat template.

    Attributes:
        messages: the messages.
        tools: functions that the model may call, in OpenAI's form.
        opens_answer: end with the beginning of the assistant's answer.
        continues: leave the last message open, so that the model continues it.
        template: a template that replaces the tokenizer's.
        variables: variables of the template, such as `enable_thinking`.
    """

    messages: Messages
    tools: Sequence[Mapping[str, Any]] = ()
    opens_answer: bool = True
    continues: bool = False
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


Prompt = str | Messages | Chat


def has_template(tokenizer: Any) -> bool:
    """Whether the tokenizer has a chat template."""
    return bool(tokenizer.chat_template)


def template(tokenizer: Any, chat: Chat) -> str:
    """Return the text of the template that a chat is rendered with; empty without one."""
    if chat.template is not None:
        return chat.template
    published = tokenizer.chat_template
    if isinstance(published, dict):
        return str(published.get("tool_use" if chat.tools and "tool_use" in published else "default", ""))
    return published or ""


def has_variable(text: str, name: str) -> bool:
    """Return whether the expressions of a template contain a name, outside quotes."""
    expressions = " ".join(re.findall(r"\{[{%].*?[}%]\}", text, re.DOTALL))
    unquoted = re.sub(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", "''", expressions)
    return re.search(rf"(?<!\w){re.escape(name)}(?!\w)", unquoted) is not None


def reserved(tokenizer: Any) -> frozenset[str]:
    """Return the names that cannot be variables of a template, because `apply_chat_template` has arguments so named."""
    return frozenset(inspect.signature(tokenizer.apply_chat_template).parameters) | {"messages"}


def prompt_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Tokenize a prompt; messages without a `Chat` end where the assistant's answer starts.

    Raises:
        ValueError: there are no tokens, the tokenizer has no chat template, the template rejects the messages or fails,
            or the tokenizer cannot read the text, for example because it contains a lone surrogate.
    """
    if isinstance(prompt, str):
        ids = _ids(tokenizer, prompt)
    else:
        chat = prompt if isinstance(prompt, Chat) else Chat(prompt)
        if not template(tokenizer, chat):
            raise ValueError("the model has no chat template: pass plain text to continue")
        _, ids = chat_prompt(tokenizer, chat)
    if not ids:
        raise ValueError("the prompt has no tokens")
    return ids


def text_ids(tokenizer: Any, text: str, *, special: bool = False, controls: bool = False) -> list[int]:
    """Tokenize a text, which may be empty.

    Args:
        tokenizer: a tokenizer.
        text: the text.
        special: add the tokenizer's tokens at the start and the end.
        controls: text that spells a control token is that token.

    Raises:
        ValueError: the tokenizer cannot read the text.
    """
    foreign = [] if controls else [(0, len(text))]
    return _ids(tokenizer, text, foreign, add_special_tokens=special) if text or special else []


def positions(model: Any) -> int | None:
    """Return the model's context length in tokens, prompt included; None if the configuration does not specify it."""
    found = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 0 else None


def rendered(tokenizer: Any, chat: Chat) -> str:
    """Return the text of a chat as the template writes it.

    Raises:
        ValueError: the template rejects the messages or fails.
    """
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            list(chat.messages),
            tools=list(chat.tools) or None,
            chat_template=chat.template,
            add_generation_prompt=chat.opens_answer,
            continue_final_message=chat.continues,
            tokenize=False,
            **chat.variables,
        )
    except Exception as error:  # templates are programs and may raise anything
        said = str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"the model's chat template rejects the messages: {said}") from error
    return text


def chat_prompt(tokenizer: Any, chat: Chat) -> tuple[str, list[int]]:
    """Return the text of a chat and its token ids; only the template's marks become control tokens.

    Raises:
        ValueError: the template rejects the messages or fails, or the tokenizer cannot read the text.
    """
    marks = _Marks(tokenizer, chat)
    text, foreign = marks.removed(rendered(tokenizer, marks.put(chat)))
    return text, _ids(tokenizer, text, foreign, add_special_tokens=False)


class _Marks:
    """Marks control tokens that messages spell, so that they are found in the text that the template writes.

    A mark is a pair of characters that neither the chat nor Unicode text uses (U+FDD0 to U+FDEF).
    """

    def __init__(self, tokenizer: Any, chat: Chat) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        text = template(tokenizer, chat)
        special = {token.content for token in added if token.special and token.content}
        written = {token.content for token in added if token.content in text and token.content.strip()}
        self._special, self._all = _pattern(special), _pattern(special | written)
        used = json.dumps([list(chat.messages), list(chat.tools)], ensure_ascii=False, default=str)
        free = [character for character in map(chr, range(0xFDD0, 0xFDF0)) if character not in used]
        if len(free) < 2:
            raise ValueError("the messages use every noncharacter from U+FDD0 to U+FDEF")
        self._open, self._close = free[:2]

    def put(self, chat: Chat) -> Chat:
        """Return the chat with marks around control tokens."""
        messages = [self._marked(message, message.get("role") == "assistant") for message in chat.messages]
        return replace(chat, messages=messages, tools=[self._marked(tool, False) for tool in chat.tools])

    def removed(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """Return the text without marks, and the spans that they enclosed."""
        marks = "|".join(f"{mark}|\\\\u{ord(mark):04x}" for mark in (self._open, self._close))  # or escaped as in JSON
        parts, spans, size, opened = [], [], 0, 0
        for part in re.split(f"({marks})", text):
            if part in (self._open, f"\\u{ord(self._open):04x}"):
                opened = size
            elif part in (self._close, f"\\u{ord(self._close):04x}"):
                spans.append((opened, size))
            else:
                parts.append(part)
                size += len(part)
        return "".join(parts), spans

    def _marked(self, value: Any, is_assistant: bool) -> Any:
        if isinstance(value, str):
            pattern = self._special if is_assistant else self._all
            return pattern.sub(rf"{self._open}\g<0>{self._close}", value) if pattern else value
        if isinstance(value, Mapping):
            return {name: self._marked(item, is_assistant) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, is_assistant) for item in value]
        return value


def _pattern(tokens: set[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the longest of some texts; None for no text."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))) if tokens else None


def _ids(tokenizer: Any, text: str, foreign: Sequence[tuple[int, int]] = (), **options: Any) -> list[int]:
    """Tokenize a text. Control tokens inside the spans `foreign` are text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text has a lone surrogate at character {error.start}, which is not valid Unicode"
        ) from error
    try:
        with contained():
            if foreign:
                return _without_control(tokenizer, text, foreign, options)
            ids: list[int] = tokenizer(text, **options).input_ids
    except Exception as error:
        raise ValueError(f"the tokenizer cannot read the text: {type(error).__name__}: {error}") from error
    return ids


def _without_control(
    tokenizer: Any, text: str, foreign: Sequence[tuple[int, int]], options: Mapping[str, Any]
) -> list[int]:
    """Tokenize a text, and then the added tokens that overlap `foreign` as ordinary text."""
    encoded = tokenizer(text, return_offsets_mapping=True, **options)
    added = tokenizer.added_tokens_decoder
    ids: list[int] = []
    for token, (start, end) in zip(encoded.input_ids, encoded.offset_mapping, strict=True):
        if token in added and any(start < last and first < end for first, last in foreign):
            ids += _plain(tokenizer.backend_tokenizer)(text[start:end])
        else:
            ids.append(token)
    return ids


def _plain(backend: Any) -> Callable[[str], list[int]]:
    """Return a function that tokenizes a text without added tokens, with a `tokenizers.Tokenizer`."""

    def read(text: str) -> list[int]:
        normal = backend.normalizer.normalize_str(text) if backend.normalizer else text
        words = (
            [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(normal)] if backend.pre_tokenizer else [normal]
        )
        return [token.id for word in words for token in backend.model.tokenize(word)]

    return read
