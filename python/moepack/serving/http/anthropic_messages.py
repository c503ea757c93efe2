"""Anthropic's `/v1/messages`, whole and streamed, and `/v1/messages/count_tokens`."""

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Literal

from fastapi import Request as HttpRequest
from pydantic import Field, field_validator

from moepack.serving.chat import grammar
from moepack.serving.http.answers import Answers, Running, event, streamed
from moepack.serving.http.body import read
from moepack.serving.http.chats import Block, Blocks, Prepared, Turn, blocks, parts, prepare
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import TEXT, Fields, Sampled, Stops, wrong
from moepack.serving.sequence import Piece
from moepack.serving.text.prompts import has_variable

__all__ = ["count_tokens", "messages"]


class Content(Fields):
    """A block of a message: text, a call, its result, or reasoning.

    `cache_control` cannot change an answer. A failed call's result starts with "Error: ", because templates have no
    other place for `is_error`.
    """

    neutral: ClassVar = {"citations": ([],)}
    forms: ClassVar = {"content": TEXT}

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: list["Content"] = Field([])
    thinking: str | None = None
    signature: str = ""
    is_error: bool = False
    cache_control: dict[str, Any] = Field({})

    @field_validator("content", mode="before")
    @classmethod
    def _text_or_blocks(cls, content: Any) -> Any:
        return as_blocks(content)

    def check(self, place: str, role: str) -> None:
        """Reject fields that the type does not have, and types that the role does not have."""
        wanted = {
            "text": ("text",),
            "tool_use": ("id", "name", "input"),
            "tool_result": ("tool_use_id",),
            "thinking": ("thinking",),
        }
        optional = {"content", "is_error"} if self.type == "tool_result" else set()
        optional |= {"signature"} if self.type == "thinking" else set()
        missing = next((name for name in wanted[self.type] if getattr(self, name) is None), None)
        if missing:
            raise _refusal(f"{place}.{missing}", "is required", "missing_required_parameter")
        allowed = {*wanted[self.type], *optional, "type", "cache_control"}
        extra = next((name for name in self.model_fields_set if name not in allowed), None)
        if extra:
            raise _refusal(f"{place}.{extra}", f"does not belong to a block of type '{self.type}'")
        own = {"user": ("tool_result",), "assistant": ("tool_use", "thinking")}
        if self.type not in ("text", *own.get(role, ())):
            raise _refusal(f"{place}.type", f"'{self.type}' does not belong to messages of the {role}")
        for number, inner in enumerate(self.content):
            if inner.type != "text":
                raise _refusal(f"{place}.content[{number}].type", "must be 'text'")
            inner.check(f"{place}.content[{number}]", role)


class Message(Fields):
    """A message of a chat."""

    forms: ClassVar = {"content": TEXT}

    role: Literal["user", "assistant", "system"]
    content: list[Content]

    @field_validator("content", mode="before")
    @classmethod
    def _text_or_blocks(cls, content: Any) -> Any:
        return as_blocks(content)

    def plain(self) -> list[dict[str, Any]]:
        """Return the message in the form of chat templates: results of calls are messages of their own."""
        text = "".join(block.text or "" for block in self.content if block.type == "text")
        if self.role == "system":
            return [{"role": "system", "content": text}]
        if self.role == "user":
            results = [
                {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": "Error: " * block.is_error + "".join(inner.text or "" for inner in block.content),
                }
                for block in self.content
                if block.type == "tool_result"
            ]
            has_text = any(block.type == "text" for block in self.content)
            return [*results, {"role": "user", "content": text}] if has_text or not results else results
        plain: dict[str, Any] = {"role": "assistant", "content": text}
        calls = [block for block in self.content if block.type == "tool_use"]
        if calls:
            plain["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.input}}
                for call in calls
            ]
        thoughts = [block.thinking or "" for block in self.content if block.type == "thinking"]
        if thoughts:
            plain |= {"reasoning_content": "".join(thoughts), "thinking": "".join(thoughts)}
        return [plain]


class Tool(Fields):
    """A function that the model may call."""

    neutral: ClassVar = {"defer_loading": (False,)}

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    input_schema: dict[str, Any]
    type: Literal["custom"] = "custom"
    strict: bool = False
    cache_control: dict[str, Any] = Field({})

    def plain(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "strict": True} if self.strict else function}


class ToolChoice(Fields):
    """Whether functions may, must or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Fields):
    """Whether the model reasons, and for how many tokens."""

    neutral: ClassVar = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)


class OutputFormat(Fields):
    """The form of the text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """Options of the answer."""

    format: OutputFormat | None = None
    effort: str | None = None


class ContextEdit(Fields):
    """A change of the messages before the model reads them. Only one that keeps all reasoning is supported."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Fields):
    """Changes of the messages."""

    edits: list[ContextEdit] = Field(default_factory=list)


class CountRequest(Fields):
    """The fields that make the prompt.

    A `thread` of messages that the server keeps is refused in the form after which clients send all messages.
    """

    forms: ClassVar = {"system": TEXT}

    model: str
    messages: list[Message] = Field(min_length=1)
    system: list[Content] = Field([])
    tools: list[Tool] = Field([], max_length=512)
    tool_choice: ToolChoice = Field(ToolChoice(type="auto"))
    thinking: Thinking | None = None
    output_config: OutputConfig = Field(OutputConfig())
    context_management: ContextManagement = Field(ContextManagement())
    thread: dict[str, Any] | None = None

    @field_validator("system", mode="before")
    @classmethod
    def _text_or_blocks(cls, content: Any) -> Any:
        return as_blocks(content)

    def turn(self, answers: Answers) -> Turn:
        """Return the turn that is to be answered.

        Raises:
            Refusal: fields contradict each other.
        """
        if self.thread is not None:
            details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            raise Refusal(400, "thread is not supported", "unsupported_parameter", param="thread", details=details)
        for number, message in enumerate(self.messages):
            for place, block in enumerate(message.content):
                block.check(f"messages[{number}].content[{place}]", message.role)
        for place, block in enumerate(self.system):
            block.check(f"system[{place}]", "system")
        system = "".join(block.text or "" for block in self.system)
        said = [{"role": "system", "content": system}] if self.system else []
        choice = self.tool_choice
        if choice.type == "tool" and choice.name is None:
            raise _refusal("tool_choice.name", "is required", "missing_required_parameter")
        words = {"any": "required", "tool": f"name:{choice.name}"}
        last, form = self.messages[-1], self.output_config.format
        continues = last.role == "assistant" and not any(block.type == "tool_use" for block in last.content)
        return Turn(
            [*said, *(plain for message in self.messages for plain in message.plain())],
            [tool.plain() for tool in self.tools],
            words.get(choice.type, choice.type),
            not choice.disable_parallel_tool_use,
            self._variables(answers),
            opens_answer=not continues,
            continues=continues,
            shape=None if form is None else ("output_config.format", grammar.json_schema(form.schema_)),
            budget=None if self.thinking is None else self.thinking.budget_tokens,
            params={
                "messages": "messages",
                "variables.reasoning_effort": "output_config.effort",
                "variables.enable_thinking": "thinking",
                "budget": "thinking.budget_tokens",
            },
        )

    def _variables(self, answers: Answers) -> dict[str, Any]:
        """Return the variables of the template that control reasoning. Models without one never, or always, reason.

        Anthropic's default effort is "high", so it asks for nothing if the template knows no efforts.
        """
        template = answers.settings.template or str(answers.engine.tokenizer.chat_template or "")
        wanted = self.output_config.effort
        is_default = wanted == "high" and not has_variable(template, "reasoning_effort")
        effort = {} if wanted is None or is_default else {"reasoning_effort": wanted}
        if self.thinking is None:
            return effort
        if has_variable(template, "enable_thinking"):
            return {**effort, "enable_thinking": self.thinking.type != "disabled"}
        return effort


class MessagesRequest(CountRequest):
    """A request for an answer."""

    neutral: ClassVar = {"service_tier": ("auto", "standard_only"), "top_k": (-1,)}

    max_tokens: int = Field(ge=1)
    stop_sequences: Stops = Field([])
    stream: bool = False
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    metadata: dict[str, Any] = Field({})
    cache_control: dict[str, Any] = Field({})

    def sampled(self) -> Sampled:
        """Return the sampling fields in the form of the other protocols."""
        given = {name: getattr(self, name) for name in ("model", "max_tokens", "temperature", "top_p", "top_k")}
        return Sampled.model_validate({**given, "stop": self.stop_sequences})


async def count_tokens(answers: Answers, request: HttpRequest) -> dict[str, Any]:
    """Return the number of tokens of a prompt."""
    body = await read(request, CountRequest)
    answers.require_model(body.model)
    return {"input_tokens": len((await prepare(answers, body.turn(answers))).ids)}


async def messages(answers: Answers, request: HttpRequest) -> Any:
    """Answer a request."""
    body = await read(request, MessagesRequest)
    answers.require_model(body.model)
    prepared = await prepare(answers, body.turn(answers))
    running = answers.run(body.sampled(), [prepared.ids], "messages", lark=prepared.lark, budget=prepared.budget)
    head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body.model}
    if body.stream:
        events = _events(running, prepared, head)
        alive = event({"type": "ping"}, "ping")
        return streamed(running, events, lambda refusal: event(refusal.anthropic, "error"), alive=alive)
    (answer,) = await running.whole(request)
    found = blocks(prepared, answer.text)
    content = [_block(block, block.text) for block in found]
    ended = _ended(answer.last, any(block.kind == "call" for block in found))
    return {**head, "content": content, **ended, "usage": _usage(running, answer.last)}


def _block(block: Block, text: str) -> dict[str, Any]:
    """Return a block with a text."""
    if block.call is not None:
        arguments: Any = {}
        try:
            arguments = json.loads(text or "{}")
        except ValueError:  # the answer ended inside the arguments
            arguments = {"arguments": text}
        return {"type": "tool_use", "id": f"toolu_{block.call.id}", "name": block.call.name, "input": arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


async def _events(running: Running, prepared: Prepared, head: dict[str, Any]) -> AsyncIterator[bytes]:
    """Yield an answer as it is written."""

    def named(kind: str, **content: Any) -> bytes:
        return event({"type": kind, **content}, kind)

    found, last = Blocks(), Piece("")
    start = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(running, last)}
    yield named("message_start", message=start)
    async for part in parts(running, prepared):
        last = part.piece
        for delta in part.deltas:
            block, is_new, text = found.add(delta)
            if is_new and block.number:
                yield named("content_block_stop", index=block.number - 1)
            if is_new:
                yield named("content_block_start", index=block.number, content_block=_block(block, ""))
            if text:
                yield named("content_block_delta", index=block.number, delta=_delta(block, text))
    if found.all:
        yield named("content_block_stop", index=len(found.all) - 1)
    ended = _ended(last, any(block.kind == "call" for block in found.all))
    yield named("message_delta", delta=ended, usage=_usage(running, last))
    yield named("message_stop")


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "call":
        return {"type": "input_json_delta", "partial_json": text}
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    return {"type": "text_delta", "text": text}


def _ended(last: Piece, has_calls: bool) -> dict[str, Any]:
    """Return how an answer ended."""
    stop = last.ended_by if isinstance(last.ended_by, str) else None
    reason = "max_tokens" if last.finish == "length" else "stop_sequence" if stop is not None else "end_turn"
    return {"stop_reason": "tool_use" if has_calls and last.finish == "stop" else reason, "stop_sequence": stop}


def _usage(running: Running, last: Piece) -> dict[str, int]:
    """Return Anthropic's usage, which counts cached tokens apart."""
    return {
        "input_tokens": running.prompt - last.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": last.cached,
        "output_tokens": last.tokens,
    }


def as_blocks(content: Any) -> Any:
    """Return a list of blocks for a string or a list."""
    if not isinstance(content, str | list):
        raise wrong("must be a string or a list of blocks")
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _refusal(param: str, sentence: str, code: str = "invalid_value") -> Refusal:
    return Refusal(400, f"{param} {sentence}", code, param=param)
