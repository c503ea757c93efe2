"""Chats of all protocols: messages and tools through the chat template, and the parts of answers.

Invariant: what a chat template would ignore is rejected. A template without tools, calls in the history, names or a
variable cannot honour them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Ordered
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from moepack.serving.chat import grammar
from moepack.serving.chat.calls import Tools
from moepack.serving.chat.dialects import adapted, with_leading_system, with_text_arguments
from moepack.serving.chat.formats import Format, format_of
from moepack.serving.chat.reader import CallPart, Delta
from moepack.serving.constraint import Budget
from moepack.serving.http.answers import Answers, Running
from moepack.serving.http.refusal import Refusal
from moepack.serving.sequence import Piece
from moepack.serving.text.prompts import Chat, chat_prompt, has_variable, rendered, reserved, template

__all__ = [
    "Block",
    "Blocks",
    "CalledFunction",
    "ChatText",
    "Part",
    "Prepared",
    "Turn",
    "blocks",
    "parts",
    "prepare",
    "texts",
]


@dataclass(frozen=True)
class Turn:
    """The next turn of a chat, in the form of chat templates.

    Attributes:
        messages: the messages.
        tools: functions in OpenAI's form.
        choice: "auto", "none", "required", or `name:` and the name of a function that must be called.
        parallel: several calls in one answer are allowed.
        variables: variables of the template.
        opens_answer, continues: as in `Chat`.
        shape: the field that constrains the answer, and the grammar's rule `body`.
        splits_reasoning: reasoning is separated from content.
        budget: maximum tokens of reasoning; None for no limit.
        params: names of the fields `messages`, `tools`, `variables` and `budget` in the request, and of single
            variables (`variables.enable_thinking`) that have fields of their own.
    """

    messages: Ordered[Mapping[str, Any]]
    tools: Tools = ()
    choice: str = "auto"
    parallel: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    opens_answer: bool = True
    continues: bool = False
    shape: tuple[str, str] | None = None
    splits_reasoning: bool = True
    budget: int | None = None
    params: Mapping[str, str] = field(default_factory=dict)

    def param(self, name: str) -> str:
        """Return the name of a field in the request."""
        return self.params.get(name, name)

    def variable(self, name: str) -> str:
        """Return the name of a variable's field in the request."""
        return self.params.get(f"variables.{name}") or f"{self.param('variables')}.{name}"

    def place(self, number: int, name: str) -> str:
        """Return the name of a field of a message in the request."""
        return self.params.get("messages", f"messages[{number}].{name}")


@dataclass(frozen=True)
class Prepared:
    """A turn that is ready to be answered.

    Attributes:
        ids: token ids of the prompt.
        text: its text.
        form: the format of the answer.
        tools: functions that may be called.
        splits_reasoning: reasoning is separated from content.
        lark: the field that constrains the answer, and the grammar; None without one.
        budget: bounds the tokens of reasoning; None without a limit.
    """

    ids: list[int]
    text: str
    form: Format
    tools: Tools
    splits_reasoning: bool
    lark: tuple[str, str] | None
    budget: Budget | None = None

    def reader(self) -> Any:
        """Return a reader for one answer."""
        return self.form.reader(self.text, self.tools, self.splits_reasoning)


async def prepare(answers: Answers, turn: Turn) -> Prepared:
    """Render and tokenize a turn.

    Raises:
        Refusal: the template rejects the messages, or would ignore a part of them.
    """
    return await asyncio.to_thread(_prepared, answers, turn)


def _prepared(answers: Answers, turn: Turn) -> Prepared:
    tokenizer, settings = answers.engine.tokenizer, answers.settings
    tools = _chosen_tools(turn)
    variables = {**settings.variables, **turn.variables}
    chat = Chat(turn.messages, tools, turn.opens_answer, turn.continues, settings.template, variables)
    source = template(tokenizer, chat)
    if not source:
        raise Refusal(400, "the model has no chat template: use /v1/completions", "no_chat_template")
    chat = replace(chat, messages=adapted(chat.messages, source))
    _require_variables(tokenizer, source, turn)
    thoughts = next((number for number, message in enumerate(turn.messages) if "reasoning_content" in message), None)
    if thoughts is not None and "reasoning_content" not in source and "thinking" not in source:
        raise _ignored(turn.place(thoughts, "reasoning_content"))
    if turn.continues and not (turn.messages and turn.messages[-1].get("role") == "assistant"):
        raise _refusal("continue_final_message", "continue_final_message requires a last message of the assistant")
    form = format_of(source)
    if tools and not form.has_calls:
        raise _refusal(
            turn.param("tools"), "the model's chat template writes calls of functions in a form that is not supported"
        )
    try:
        chat = _readable(tokenizer, chat)
        text, ids = chat_prompt(tokenizer, chat)
        _require_rendered(tokenizer, chat, turn)
    except ValueError as error:
        raise Refusal(400, str(error), "invalid_prompt", param=turn.param("messages")) from error
    if not ids:
        raise Refusal(400, "the prompt has no tokens", "invalid_prompt", param=turn.param("messages"))
    lark = _grammar(answers, turn, form, text, tools)
    if lark is not None:
        answers.compiled(*lark)
    return Prepared(ids, text, form, tools, turn.splits_reasoning, lark, _budget(answers, turn, form, text))


def _budget(answers: Answers, turn: Turn, form: Format, text: str) -> Budget | None:
    """Return what bounds the tokens of reasoning. Models without reasoning need nothing."""
    if turn.budget is None or (form.thoughts is None and not form.is_harmony):
        return None
    marks = form.thoughts or ("<|channel|>analysis", "<|end|>")
    names = {token.content: number for number, token in answers.engine.tokenizer.added_tokens_decoder.items()}
    if form.is_harmony or marks[1] not in names:
        name = turn.param("budget")
        raise _refusal(name, f"{name} is not supported: the model has no token that ends its reasoning")
    return Budget(turn.budget, names.get(marks[0]), names[marks[1]], form.is_reasoning(text))


def _readable(tokenizer: Any, chat: Chat) -> Chat:
    """Return the chat in the first form that the template takes.

    Arguments of calls may be objects, or JSON text (DeepSeek). Some templates take system messages at the beginning
    only; later ones are then joined to the first.

    Raises:
        ValueError: the template rejects all forms.
    """
    changes: list[Callable[[Ordered[Mapping[str, Any]]], Ordered[Mapping[str, Any]]]] = []
    if any("tool_calls" in message for message in chat.messages):
        changes.append(with_text_arguments)
    if any(message["role"] == "system" for message in chat.messages[1:]):
        changes.append(with_leading_system)
    if len(changes) == 2:
        changes.append(lambda said: with_leading_system(with_text_arguments(said)))
    if not changes:
        return chat
    try:
        rendered(tokenizer, chat)
    except ValueError:
        for change in changes:
            with suppress(ValueError):
                changed = replace(chat, messages=change(chat.messages))
                rendered(tokenizer, changed)
                return changed
        raise
    return chat


def _chosen_tools(turn: Turn) -> Tools:
    """Return the tools that the model sees: all, none, or the one that it must call."""
    if turn.choice == "none":
        return ()
    if turn.choice == "required" and not turn.tools:
        raise _refusal("tool_choice", "tool_choice is 'required', but there are no tools")
    if not turn.choice.startswith("name:"):
        return turn.tools
    name = turn.choice.removeprefix("name:")
    if not any(tool["function"]["name"] == name for tool in turn.tools):
        raise _refusal("tool_choice", f"tool_choice names '{name}', which is not among the tools")
    return turn.tools


def _require_variables(tokenizer: Any, source: str, turn: Turn) -> None:
    """Reject variables that the template does not have, and names that it cannot have."""
    for name in turn.variables:
        param = turn.variable(name)
        if name in reserved(tokenizer):
            raise _refusal(param, f"{param} is not a variable of a chat template")
        if not has_variable(source, name):
            raise _ignored(param)


def _require_rendered(tokenizer: Any, chat: Chat, turn: Turn) -> None:
    """Reject tools, calls and names that do not change the text of the prompt."""
    messages = list(chat.messages)
    reduced = [(turn.param("tools"), replace(chat, tools=()))] if chat.tools else []
    for name in ("tool_calls", "name"):
        having = [number for number, message in enumerate(messages) if name in message and message["role"] != "tool"]
        if having:
            less = [_without(message, name) if number in having else message for number, message in enumerate(messages)]
            reduced.append((turn.place(having[0], name), replace(chat, messages=less)))
    for param, without in reduced:
        try:
            is_ignored = rendered(tokenizer, without) == rendered(tokenizer, chat)
        except ValueError:  # the template requires it
            is_ignored = False
        if is_ignored:
            raise _ignored(param)


def _without(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a message without a key."""
    return {key: value for key, value in message.items() if key != name}


def _ignored(param: str) -> Refusal:
    return _refusal(param, f"{param} is not supported: the model's chat template ignores it")


def _grammar(answers: Answers, turn: Turn, form: Format, text: str, tools: Tools) -> tuple[str, str] | None:
    """Return the grammar of the answer; None if it is free. A required call leaves no text that could have a form."""
    tokenizer = answers.engine.tokenizer
    added = [(token.content, number) for number, token in tokenizer.added_tokens_decoder.items() if token.content]
    reasons = form.is_reasoning(text)
    forced = turn.choice == "required" or turn.choice.startswith("name:")
    if forced:
        name = turn.choice.removeprefix("name:")
        allowed = [tool for tool in tools if turn.choice == "required" or tool["function"]["name"] == name]
        several = turn.parallel and turn.choice == "required"
        return "tool_choice", grammar.calls(allowed, form, added, reasons, several)
    if turn.shape is not None:
        param, body = turn.shape
        if turn.continues or not turn.opens_answer:
            return param, grammar.plain(body)
        return param, grammar.shaped(body, form, added, reasons, tools, turn.parallel)
    if any(tool["function"].get("strict") for tool in tools) or (tools and not turn.parallel):
        return turn.param("tools"), grammar.text_or_calls(tools, form, added, reasons, turn.parallel)
    return None


def _refusal(param: str, message: str) -> Refusal:
    return Refusal(400, message, "invalid_value", param=param)


@dataclass
class Part:
    """What a piece adds to an answer.

    Attributes:
        index: the answer.
        deltas: its parts.
        piece: the piece.
        finish: how the answer ended, as in OpenAI's `finish_reason`; None before the end.
    """

    index: int
    deltas: list[Delta]
    piece: Piece
    finish: str | None = None


async def parts(running: Running, prepared: Prepared) -> AsyncIterator[Part]:
    """Yield the parts of all answers to a turn as they are written."""
    readers = [prepared.reader() for _ in running.sequences]
    async for index, piece in running.pieces():
        reader, finish = readers[index], piece.finish
        deltas = reader.put(piece.text)
        if finish is not None:
            deltas += reader.end()
        yield Part(index, deltas, piece, "tool_calls" if reader.count and finish == "stop" else finish)


@dataclass
class CalledFunction:
    """A call in an answer."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Block:
    """A run of an answer of one kind: "reasoning", "content", or one "call".

    Attributes:
        kind: its kind.
        number: its place among the blocks of the answer.
        text: its text so far; of a call, the arguments.
        call: the first part of a call.
    """

    kind: str
    number: int
    text: str = ""
    call: CallPart | None = None

    def fits(self, delta: Delta) -> bool:
        """Return whether a part continues the block."""
        if delta.call is not None:
            return self.call is not None and self.call.index == delta.call.index
        return self.kind == ("reasoning" if delta.reasoning else "content")


class Blocks:
    """The blocks of one answer, in order.

    Attributes:
        all: the blocks so far.
    """

    def __init__(self) -> None:
        self.all: list[Block] = []

    def add(self, delta: Delta) -> tuple[Block, bool, str]:
        """Add a part; return its block, whether the block is new, and the part's text."""
        is_new = not self.all or not self.all[-1].fits(delta)
        if is_new:
            kind = "call" if delta.call else "reasoning" if delta.reasoning else "content"
            self.all.append(Block(kind, len(self.all), call=delta.call))
        text = delta.call.arguments if delta.call else delta.reasoning or delta.content
        self.all[-1].text += text
        return self.all[-1], is_new, text


@dataclass
class ChatText:
    """A whole answer: reasoning, content and calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[CalledFunction] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """Add a part."""
        self.reasoning += delta.reasoning
        self.content += delta.content
        if delta.call is not None:
            if delta.call.name is not None:
                self.calls.append(CalledFunction(delta.call.id or "", delta.call.name))
            self.calls[-1].arguments += delta.call.arguments


def blocks(prepared: Prepared, text: str) -> list[Block]:
    """Return the blocks of a whole answer."""
    reader, whole = prepared.reader(), Blocks()
    for delta in [*reader.put(text), *reader.end()]:
        whole.add(delta)
    return whole.all


def texts(prepared: Prepared, text: str) -> ChatText:
    """Return the parts of a whole answer."""
    reader, whole = prepared.reader(), ChatText()
    for delta in [*reader.put(text), *reader.end()]:
        whole.add(delta)
    return whole
