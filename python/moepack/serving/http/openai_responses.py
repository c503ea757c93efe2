"""OpenAI's `/v1/responses`: text and calls of functions, whole and streamed. Responses are not stored."""

import json
import time
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
from moepack.serving.http.requests import TEXT, Fields, Sampled, wrong
from moepack.serving.sequence import Piece
from moepack.serving.text.prompts import text_ids

__all__ = ["responses"]


class InputPart(Fields):
    """A part of a message or of a result."""

    neutral: ClassVar = {"annotations": ([],), "logprobs": ([],)}

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class Item(Fields):
    """An item of the input: a message, a call, its result, or reasoning."""

    neutral: ClassVar = {"encrypted_content": ("",)}
    forms: ClassVar = {"content": TEXT, "output": TEXT}

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str = ""
    status: Literal["in_progress", "completed", "incomplete"] = "completed"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: list[InputPart] | None = None
    summary: list[InputPart] = Field([])
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: list[InputPart] | None = None

    @field_validator("content", "output", mode="before")
    @classmethod
    def _text_or_parts(cls, content: Any) -> Any:
        if not isinstance(content, str | list):
            raise wrong("must be a string or a list of parts")
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    def check(self, place: str) -> None:
        """Reject fields that the type does not have."""
        wanted: dict[str, tuple[str, ...]] = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }
        allowed = {*wanted[self.type], "type", "id", "status"}
        allowed |= {"content", "summary"} if self.type == "reasoning" else set()
        missing = next((name for name in wanted[self.type] if getattr(self, name) is None), None)
        if missing:
            param = f"{place}.{missing}"
            raise Refusal(400, f"{param} is required", "missing_required_parameter", param=param)
        extra = next((name for name in self.model_fields_set if name not in allowed), None)
        if extra:
            param = f"{place}.{extra}"
            raise Refusal(
                400, f"{param} does not belong to an item of type '{self.type}'", "invalid_value", param=param
            )
        if self.arguments is not None and not _is_object(self.arguments):
            param = f"{place}.arguments"
            raise Refusal(400, f"{param} must be the text of a JSON object", "invalid_value", param=param)


class Function(Fields):
    """A function that the model may call."""

    type: Literal["function"]
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field({})
    strict: bool = False

    def plain(self) -> dict[str, Any]:
        """Return the tool in the form of chat completions."""
        given = self.model_dump(include=self.model_fields_set - {"type"})
        return {"type": "function", "function": given}


class TextFormat(Fields):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str = ""
    description: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool = True


class TextOptions(Fields):
    """Options of the text."""

    neutral: ClassVar = {"verbosity": ("medium",)}

    format: TextFormat = Field(TextFormat.model_validate({}))


class Reasoning(Fields):
    """Options of reasoning."""

    neutral: ClassVar = {"summary": ("auto",), "generate_summary": ("auto",)}

    effort: str | None = None


class ResponsesRequest(Fields):
    """A request for a response."""

    neutral: ClassVar = {
        "store": (False,),
        "background": (False,),
        "service_tier": ("auto", "default"),
        "top_logprobs": (0,),
        "include": ([], ["reasoning.encrypted_content"]),
    }
    forms: ClassVar = {"input": TEXT, "tool_choice": {"enum": ["auto", "none", "required"]}}

    model: str
    input: list[Item] = Field(min_length=1)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    stream: bool = False
    tools: list[Function] = Field([], max_length=512)
    tool_choice: dict[str, Any] = Field({"type": "auto"})
    parallel_tool_calls: bool = True
    truncation: Literal["disabled", "auto"] = "disabled"
    text: TextOptions = Field(TextOptions.model_validate({}))
    reasoning: Reasoning = Field(Reasoning())
    chat_template_kwargs: dict[str, Any] = Field({})
    metadata: dict[str, Any] = Field({})
    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""

    @field_validator("input", mode="before")
    @classmethod
    def _text_or_items(cls, given: Any) -> Any:
        if not isinstance(given, str | list):
            raise wrong("must be a string or a list of items")
        return [{"role": "user", "content": given}] if isinstance(given, str) else given

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _word_or_name(cls, choice: Any) -> Any:
        if isinstance(choice, str) and choice in ("auto", "none", "required"):
            return {"type": choice}
        names = isinstance(choice, dict) and set(choice) == {"type", "name"} and choice["type"] == "function"
        if names and isinstance(choice["name"], str):
            return choice
        raise wrong("must be 'auto', 'none', 'required', or name a function")

    def turn(self) -> Turn:
        """Return the turn that is to be answered."""
        for number, item in enumerate(self.input):
            item.check(f"input[{number}]")
        variables, params = dict(self.chat_template_kwargs), {"messages": "input", "variables": "chat_template_kwargs"}
        if self.reasoning.effort is not None:
            variables["reasoning_effort"] = self.reasoning.effort
            params["variables.reasoning_effort"] = "reasoning.effort"
        said = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice = self.tool_choice
        return Turn(
            [*said, *_messages(self.input)],
            [tool.plain() for tool in self.tools],
            f"name:{choice['name']}" if "name" in choice else choice["type"],
            self.parallel_tool_calls,
            variables,
            shape=self._shape(),
            params=params,
        )

    def _shape(self) -> tuple[str, str] | None:
        form = self.text.format
        if form.type == "text":
            return None
        if form.type == "json_object":
            return "text.format", grammar.json_schema({"type": "object"})
        if form.schema_ is None:
            param = "text.format.schema"
            raise Refusal(400, f"{param} is required", "missing_required_parameter", param=param)
        return "text.format", grammar.json_schema(form.schema_)

    def sampled(self) -> Sampled:
        """Return the sampling fields in the form of the other protocols."""
        given = {"model": self.model, "max_tokens": self.max_output_tokens}
        return Sampled.model_validate({**given, "temperature": self.temperature, "top_p": self.top_p})


def _messages(items: list[Item]) -> list[dict[str, Any]]:
    """Return items as messages. Reasoning and calls of one answer belong to one message of the assistant."""
    said: list[dict[str, Any]] = []
    thoughts = ""
    for item in items:
        text = "".join(part.text for part in item.content or item.output or item.summary)
        if item.type == "reasoning":
            thoughts += text
            continue
        if item.type == "function_call_output":
            said.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
            continue
        if item.type == "function_call":
            call = {"name": item.name, "arguments": json.loads(item.arguments or "{}")}
            entry = {"id": item.call_id, "type": "function", "function": call}
            if said and said[-1]["role"] == "assistant" and not thoughts:
                said[-1].setdefault("tool_calls", []).append(entry)
                continue
            message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [entry]}
        else:
            message = {"role": "system" if item.role == "developer" else item.role, "content": text}
        if thoughts and message["role"] == "assistant":
            message |= {"reasoning_content": thoughts, "thinking": thoughts}
            thoughts = ""
        said.append(message)
    return said


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


async def responses(answers: Answers, request: HttpRequest) -> Any:
    """Answer a request."""
    body = await read(request, ResponsesRequest)
    answers.require_model(body.model)
    prepared = await _fitting(answers, body)
    running = answers.run(body.sampled(), [prepared.ids], "input", lark=prepared.lark)
    head = _head(body)
    if body.stream:
        writer = _Writer(answers, head)

        def failed(refusal: Refusal) -> bytes:
            error = {"code": "server_error", "message": refusal.content["error"]["message"]}
            return writer.named("response.failed", response={**head, "status": "failed", "error": error})

        return streamed(running, writer.events(running, prepared), failed)
    (answer,) = await running.whole(request)
    ids = _Ids()
    output = [_item(block, ids(block), block.text, "completed") for block in blocks(prepared, answer.text)]
    return {**head, "output": output, **_ended(answers, running, answer.last, output)}


async def _fitting(answers: Answers, body: ResponsesRequest) -> Prepared:
    """Prepare a request; with `truncation: auto`, without the oldest items if they leave no room for an answer.

    Leading system messages stay. The other items begin with a message of the user, at the latest with the last one.
    """
    prepared, most = await prepare(answers, body.turn()), answers.engine.context
    most -= min(body.max_output_tokens or answers.settings.answer, most // 2)
    if body.truncation == "disabled" or len(prepared.ids) <= most:
        return prepared
    roles = [item.role if item.type == "message" else None for item in body.input]
    kept = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    starts = [at for at, role in enumerate(roles) if role == "user" and at > kept]
    first, last = 0, len(starts) - 1
    # A bisection, because each attempt tokenizes all items that are left.
    while first <= last:
        middle = (first + last) // 2
        left = [*body.input[:kept], *body.input[starts[middle] :]]
        found = await prepare(answers, body.model_copy(update={"input": left}).turn())
        fits = len(found.ids) <= most
        first, last = (first, middle - 1) if fits else (middle + 1, last)
        prepared = found if fits or first == len(starts) else prepared
    return prepared


def _head(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a response that are known at the start."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": body.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": {"format": {"type": body.text.format.type}}
        if body.text.format.type != "json_schema"
        else {"format": body.text.format.model_dump(by_alias=True)},
        "tool_choice": body.tool_choice if "name" in body.tool_choice else body.tool_choice["type"],
        "tools": [tool.model_dump() for tool in body.tools],
        "top_p": body.top_p,
        "truncation": body.truncation,
        "usage": None,
    }


class _Ids:
    """The ids of the items of a response."""

    _PREFIX: ClassVar = {"call": "fc", "reasoning": "rs", "content": "msg"}

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def __call__(self, block: Block) -> str:
        return self._known.setdefault(block.number, f"{self._PREFIX[block.kind]}_{uuid.uuid4().hex}")


def _item(block: Block, number: str, text: str, status: str) -> dict[str, Any]:
    """Return an item of the output with a text."""
    if block.call is not None:
        call = {"call_id": f"call_{block.call.id}", "name": block.call.name, "arguments": text}
        return {"type": "function_call", "id": number, **call, "status": status}
    if block.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": text}] if text else []
        return {"type": "reasoning", "id": number, "summary": [], "content": content, "status": status}
    content = [_text(text)] if text else []
    return {"type": "message", "id": number, "role": "assistant", "status": status, "content": content}


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _ended(answers: Answers, running: Running, last: Piece, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of a response that are known at the end."""
    is_cut = last.finish == "length"
    thoughts = [part["text"] for item in output if item["type"] == "reasoning" for part in item["content"]]
    reasoning = sum(len(text_ids(answers.engine.tokenizer, text)) for text in thoughts)
    return {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "usage": {
            "input_tokens": running.prompt,
            "input_tokens_details": {"cached_tokens": last.cached},
            "output_tokens": last.tokens,
            "output_tokens_details": {"reasoning_tokens": min(reasoning, last.tokens)},
            "total_tokens": running.prompt + last.tokens,
        },
    }


class _Writer:
    """Writes the events of one response, which are numbered."""

    _NAMES: ClassVar = {
        "call": "response.function_call_arguments",
        "reasoning": "response.reasoning_text",
        "content": "response.output_text",
    }

    def __init__(self, answers: Answers, head: dict[str, Any]) -> None:
        self._answers, self._head, self._ids, self._count = answers, head, _Ids(), 0

    def named(self, kind: str, **content: Any) -> bytes:
        """Return an event."""
        self._count += 1
        return event({"type": kind, "sequence_number": self._count - 1, **content}, kind)

    async def events(self, running: Running, prepared: Prepared) -> AsyncIterator[bytes]:
        """Yield a response as it is written."""
        yield self.named("response.created", response=self._head)
        yield self.named("response.in_progress", response=self._head)
        found, last = Blocks(), Piece("")
        async for part in parts(running, prepared):
            last = part.piece
            for delta in part.deltas:
                block, is_new, text = found.add(delta)
                if is_new and block.number:
                    for one in self._closed(found.all[-2]):
                        yield one
                if is_new:
                    for one in self._opened(block):
                        yield one
                if text:
                    more: dict[str, Any] = {"logprobs": []} if block.kind == "content" else {}
                    yield self.named(f"{self._NAMES[block.kind]}.delta", **self._place(block), delta=text, **more)
        if found.all:
            for one in self._closed(found.all[-1]):
                yield one
        output = [_item(block, self._ids(block), block.text, "completed") for block in found.all]
        ended = {**self._head, "output": output, **_ended(self._answers, running, last, output)}
        yield self.named(f"response.{ended['status']}", response=ended)

    def _place(self, block: Block) -> dict[str, Any]:
        place = {"item_id": self._ids(block), "output_index": block.number}
        return place if block.kind == "call" else {**place, "content_index": 0}

    def _opened(self, block: Block) -> list[bytes]:
        item = _item(block, self._ids(block), "", "in_progress")
        events = [self.named("response.output_item.added", output_index=block.number, item=item)]
        if block.kind == "content":
            events.append(self.named("response.content_part.added", **self._place(block), part=_text("")))
        return events

    def _closed(self, block: Block) -> list[bytes]:
        name, place = f"{self._NAMES[block.kind]}.done", self._place(block)
        if block.call is not None:
            events = [self.named(name, **place, name=block.call.name, arguments=block.text)]
        elif block.kind == "reasoning":
            events = [self.named(name, **place, text=block.text)]
        else:
            events = [self.named(name, **place, text=block.text, logprobs=[])]
            events.append(self.named("response.content_part.done", **place, part=_text(block.text)))
        item = _item(block, self._ids(block), block.text, "completed")
        return [*events, self.named("response.output_item.done", output_index=block.number, item=item)]
