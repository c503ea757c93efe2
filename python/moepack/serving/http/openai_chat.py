"""OpenAI's `/v1/chat/completions`, with the fields of vLLM and llama.cpp that its clients send."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from collections.abc import Sequence as Ordered
from typing import Any, ClassVar, Literal

from fastapi import Request as HttpRequest
from pydantic import Field, ValidationInfo, field_validator

from moepack.serving.chat.reader import Delta
from moepack.serving.http.answers import Answer, Answers, Running, event, streamed, usage
from moepack.serving.http.body import read
from moepack.serving.http.chats import CalledFunction, Prepared, Turn, parts, prepare, texts
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import NEUTRAL, TEXT, Fields, wrong
from moepack.serving.http.structure import Structured
from moepack.serving.sequence import Score

__all__ = ["ChatRequest", "Tool", "chats"]


class ContentPart(Fields):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class CalledName(Fields):
    """The function of a call in the history. Arguments are a JSON object as text."""

    name: str
    arguments: str = "{}"

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, arguments: str) -> str:
        try:
            is_object = isinstance(json.loads(arguments or "{}"), dict)
        except (ValueError, RecursionError):
            is_object = False
        if not is_object:
            raise wrong("must be the text of a JSON object")
        return arguments


class ToolCall(Fields):
    """A call in the history."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledName
    index: int | None = None


class Message(Fields):
    """A message of a chat."""

    neutral: ClassVar = {"annotations": ([],), "tool_calls": ([],)}
    forms: ClassVar = {"content": TEXT}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[ContentPart] | None = Field(None, min_length=1)
    name: str | None = None
    tool_calls: list[ToolCall] = Field([])
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_or_parts(cls, content: Any) -> Any:
        if not isinstance(content, str | list):
            raise wrong("must be a string or a list of parts")
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    def check(self, place: str) -> None:
        """Reject fields that do not belong to the role."""
        for is_wrong, name, sentence in (
            (self.content is None and not self.tool_calls, "content", "is required"),
            (bool(self.tool_calls) and self.role != "assistant", "tool_calls", "belongs to messages of the assistant"),
            (self.tool_call_id is not None and self.role != "tool", "tool_call_id", "belongs to messages of a tool"),
            ((self.reasoning_content or self.reasoning) is not None and self.role != "assistant",
             "reasoning_content", "belongs to messages of the assistant"),
        ):  # fmt: skip
            if is_wrong:
                code = "missing_required_parameter" if name == "content" else "invalid_value"
                raise Refusal(400, f"{place}.{name} {sentence}", code, param=f"{place}.{name}")

    def plain(self) -> dict[str, Any]:
        """Return the message in the form of chat templates, which take arguments as objects."""
        role = "system" if self.role == "developer" else self.role
        content = "".join(part.text for part in self.content or [])
        plain: dict[str, Any] = {"role": role, "content": content}
        if self.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments or "{}")},
                }
                for call in self.tool_calls
            ]
        thought = self.reasoning_content if self.reasoning_content is not None else self.reasoning
        if thought is not None:
            plain |= {"reasoning_content": thought, "thinking": thought}  # gpt-oss's template reads the second
        name = None if self.name == self.role else self.name  # AutoGen repeats the role
        named = {"name": name, "tool_call_id": self.tool_call_id}
        return {**plain, **{name: value for name, value in named.items() if value is not None}}


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False


class Tool(Fields):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        """Return the tool as the client wrote it."""
        given = self.function.model_dump(include=self.function.model_fields_set | {"name"})
        return {"type": "function", "function": given}


class NamedFunction(Fields):
    """The name of a function."""

    name: str


class ToolChoice(Fields):
    """Whether functions may, must or must not be called, or the one that must be."""

    type: Literal["auto", "none", "required", "function"]
    function: NamedFunction | None = None

    @property
    def word(self) -> str:
        """The choice in the form of `Turn`."""
        return f"name:{self.function.name}" if self.function else self.type


class ChatRequest(Structured):
    """A chat completion request."""

    neutral: ClassVar = {
        **NEUTRAL,
        "tools": ([],),
        "add_special_tokens": (False,),
        "top_logprobs": (0,),
        "echo": (False,),
        "thinking_token_budget": (-1,),
        "thinking_budget_tokens": (-1,),
    }
    forms: ClassVar = {**Structured.forms, "tool_choice": {"enum": ["auto", "none", "required"]}}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] = Field([], max_length=512)
    tool_choice: ToolChoice = Field(ToolChoice(type="auto"))
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = Field({})
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = Field(None, ge=0)
    thinking_budget_tokens: int | None = Field(None, ge=0)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    include_reasoning: bool = True

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _word_or_name(cls, choice: Any) -> Any:
        if isinstance(choice, str) and choice in ("auto", "none", "required"):
            return {"type": choice}
        if isinstance(choice, dict) and choice.get("type") == "function" and "function" in choice:
            return choice
        raise wrong("must be 'auto', 'none', 'required', or name a function")

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_length(cls, length: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if length is not None and other is not None and other != length:
            raise wrong("must equal max_tokens if both are given")
        return length

    @property
    def length(self) -> int | None:
        """Maximum number of answer tokens, or None if the client sets none."""
        return self.max_completion_tokens or self.max_tokens

    def turn(self) -> Turn:
        """Return the turn that is to be answered.

        Raises:
            Refusal: fields contradict each other.
        """
        for number, message in enumerate(self.messages):
            message.check(f"messages[{number}]")
        if self.top_logprobs and not self.logprobs:
            raise Refusal(400, "top_logprobs requires logprobs", "invalid_value", param="top_logprobs")
        opens = "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt
        if self.continue_final_message and opens:
            said = "continue_final_message cannot be combined with add_generation_prompt"
            raise Refusal(400, said, "invalid_value", param="continue_final_message")
        names = ("thinking_token_budget", "thinking_budget_tokens")  # as vLLM and llama.cpp name it
        budgets = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len({*budgets.values()}) > 1:
            raise Refusal(400, f"{names[1]} must equal {names[0]} if both are given", "invalid_value", param=names[1])
        fields = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort}
        named = {name: value for name, value in fields.items() if value is not None}
        variables = {**self.chat_template_kwargs, **named}
        params = {f"variables.{name}": name for name in named}
        return Turn(
            [message.plain() for message in self.messages],
            [tool.plain() for tool in self.tools],
            self.tool_choice.word,
            self.parallel_tool_calls,
            variables,
            self.add_generation_prompt and not self.continue_final_message,
            self.continue_final_message,
            self.constraint(),
            budget=next(iter(budgets.values()), None),
            params={"variables": "chat_template_kwargs", "budget": next(iter(budgets), ""), **params},
        )


async def chats(answers: Answers, request: HttpRequest) -> Any:
    """Answer a request."""
    body = await read(request, ChatRequest)
    answers.require_model(body.model)
    prepared = await prepare(answers, body.turn())
    top = body.top_logprobs if body.logprobs else None
    running = answers.run(body, [prepared.ids], "messages", top=top, lark=prepared.lark, budget=prepared.budget)
    head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
    if body.stream:
        head["object"] = "chat.completion.chunk"
        return streamed(
            running, _events(answers, body, running, prepared, head), lambda refusal: event(refusal.content)
        )
    found = await running.whole(request)
    choices = [_choice(answers, body, prepared, index, answer) for index, answer in enumerate(found)]
    counts = usage(running, [answer.last for answer in found])
    return {**head, "object": "chat.completion", "choices": choices, "usage": counts}


def _choice(answers: Answers, body: ChatRequest, prepared: Prepared, index: int, answer: Answer) -> dict[str, Any]:
    """Return a whole choice."""
    text = texts(prepared, answer.text)
    message: dict[str, Any] = {"role": "assistant", "content": text.content or (None if text.calls else ""),
                               "refusal": None}  # fmt: skip
    if text.reasoning and body.include_reasoning:
        message["reasoning_content"] = text.reasoning
    if text.calls:
        message["tool_calls"] = [_called(call) for call in text.calls]
    finish = "tool_calls" if text.calls and answer.last.finish == "stop" else answer.last.finish
    logprobs = _logprobs(answers, answer.scores) if body.logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}


def _called(call: CalledFunction) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


async def _events(
    answers: Answers, body: ChatRequest, running: Running, prepared: Prepared, head: dict[str, Any]
) -> AsyncIterator[bytes]:
    """Yield the choices as they are written. The first event of each has the role, the last how it ended."""
    options, last, begun = body.stream_options, {}, set()
    async for part in parts(running, prepared):
        last[part.index] = part.piece
        deltas = [written for delta in part.deltas if (written := _delta(delta, body))]
        if part.index not in begun:
            begun.add(part.index)
            deltas.insert(0, {"role": "assistant", "content": ""})
        if part.finish is not None:
            deltas.append({})
        scores = _logprobs(answers, part.piece.scores) if body.logprobs and part.piece.scores else None
        if scores is not None and all("role" in delta or not delta for delta in deltas):
            deltas.insert(1 if deltas and "role" in deltas[0] else 0, {"content": ""})
        counts = {"usage": usage(running, list(last.values()))} if options.continuous_usage_stats else {}
        for delta in deltas:
            logprobs = None
            if scores is not None and delta and "role" not in delta:
                logprobs, scores = scores, None  # the first delta carries the scores of all tokens
            is_last = part.finish is not None and not delta
            choice = {"index": part.index, "delta": delta, "logprobs": logprobs,
                      "finish_reason": part.finish if is_last else None}  # fmt: skip
            yield event({**head, "choices": [choice], **counts})
    if options.include_usage:
        yield event({**head, "choices": [], "usage": usage(running, list(last.values()))})
    yield b"data: [DONE]\n\n"


def _delta(delta: Delta, body: ChatRequest) -> dict[str, Any]:
    """Return a delta in OpenAI's form; empty if the client did not ask for it."""
    if delta.call is not None:
        call = delta.call
        if call.name is not None:
            function = {"name": call.name, "arguments": call.arguments}
            return {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]}
        return {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}
    if delta.reasoning:
        return {"reasoning_content": delta.reasoning} if body.include_reasoning else {}
    return {"content": delta.content}


def _logprobs(answers: Answers, scores: Ordered[Score]) -> dict[str, Any]:
    """Return OpenAI's scores of tokens."""

    def entry(token: int, value: float | None) -> dict[str, Any]:
        data = answers.spelling.bytes_of(token)
        return {"token": answers.spelling.text_of(token), "logprob": value, "bytes": list(data)}

    content = [
        {**entry(score.token, score.logprob), "top_logprobs": [entry(*pair) for pair in score.top]} for score in scores
    ]
    return {"content": content, "refusal": None}
