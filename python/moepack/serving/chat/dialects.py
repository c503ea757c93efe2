"""What chat templates of single families expect of messages, beyond transformers' conventions.

Agents send back answers of this server, and histories of others. Both must fit the template of the model.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["adapted", "with_leading_system", "with_text_arguments"]

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
"""The ids of calls that Mistral's templates accept."""


def adapted(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """Return messages that a template accepts.

    Mistral's templates require ids of nine letters and digits: others are replaced, the same by the same. gpt-oss's
    rejects a message with calls that has content besides reasoning: it becomes the end of the reasoning, which is shown
    in the same place. It also writes only the first call of a message: each becomes a message, followed by its result.
    """
    if "[TOOL_CALLS]" in template:
        return [_with_short_ids(message) for message in messages]
    if "<|channel|>" in template:
        return _with_single_calls([_with_one_text(message) for message in messages])
    return list(messages)


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages in which arguments of calls are JSON text, as DeepSeek's templates take them."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def with_leading_system(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages whose system messages are joined into one at the beginning, with an empty line between them."""
    texts = [str(message["content"]) for message in messages if message["role"] == "system"]
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    more: dict[str, Any] = {}
    if "tool_calls" in message:
        more["tool_calls"] = [{**call, "id": _short(call.get("id", ""))} for call in message["tool_calls"]]
    if "tool_call_id" in message:
        more["tool_call_id"] = _short(message["tool_call_id"])
    return {**message, **more}


def _short(number: str) -> str:
    return number if _SHORT_ID.fullmatch(number) else hashlib.sha256(number.encode()).hexdigest()[:9]


def _with_one_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content, thought = message.get("content"), message.get("thinking")
    if not (message.get("tool_calls") and content and thought):
        return message
    joined = f"{thought}\n{content}"
    return {**message, "content": "", "thinking": joined, "reasoning_content": joined}


def _with_single_calls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return messages with at most one call each, followed by its result."""
    found: list[Mapping[str, Any]] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while left and left[0].get("role") == "tool":
            results.append(left.pop(0))
        for number, call in enumerate(calls):
            texts = message if number == 0 else {"role": message["role"], "content": ""}
            found.append({**texts, "tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call.get("id")]
            found += own
            results = [result for result in results if result not in own]
        found += results
    return found
