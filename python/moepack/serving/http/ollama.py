"""ollama's HTTP API: `/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/show` and `/api/version`.

Answers are streamed as lines of JSON unless a request says otherwise. Errors are `{"error": message}`.
"""

import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from datetime import UTC, datetime
from typing import Any, ClassVar, Literal

from fastapi import Request as HttpRequest
from pydantic import Field, field_validator

from moepack.format.weights import weight_files
from moepack.serving.chat import grammar
from moepack.serving.http.answers import Answers, Running, fingerprint, streamed
from moepack.serving.http.body import read
from moepack.serving.http.chats import ChatText, Prepared, Turn, parts, prepare, texts
from moepack.serving.http.infill import infill_ids
from moepack.serving.http.llama_options import LlamaOptions
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import Fields, Sampled, wrong
from moepack.serving.sequence import Piece
from moepack.serving.text.prompts import Chat, has_variable, template

__all__ = ["VERSION", "Options", "chat", "generate", "known", "running_models", "show", "tags"]

VERSION = "0.12.6"
"""The version of ollama whose API this is. Front ends compare it."""
LATEST = ":latest"
"""The tag that clients add to names."""
LINES = "application/x-ndjson"


class Options(LlamaOptions):
    """Options of a model. Those from `num_keep` on concern ollama's memory and cannot change an answer here."""

    neutral: ClassVar = {**LlamaOptions.neutral, "num_predict": (-1, -2), "vocab_only": (False,)}

    num_predict: int | None = Field(None, ge=1)
    num_ctx: int | None = Field(None, ge=1)
    num_keep: int = 0
    num_gpu: int = 0
    main_gpu: int = 0
    num_batch: int = 0
    num_thread: int = 0
    use_mmap: bool = True
    use_mlock: bool = False
    numa: bool = False
    low_vram: bool = False
    f16_kv: bool = True

    def require_context(self, answers: Answers) -> None:
        """Reject a context beyond the server's."""
        if self.num_ctx is not None and self.num_ctx > answers.engine.context:
            message = f"options.num_ctx must be at most {answers.engine.context}, the server's context"
            raise Refusal(400, message, "invalid_value", param="options.num_ctx")


class Asked(Fields):
    """The fields that chats and completions share. `keep_alive` cannot change an answer."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {"format": ("",), "images": ([],)}

    model: str
    stream: bool = True
    format: Any = None
    options: Options = Options.model_validate({})
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: Any = None

    @field_validator("format")
    @classmethod
    def _json_or_schema(cls, form: Any) -> Any:
        if form != "json" and not isinstance(form, dict):
            raise wrong("must be 'json' or a JSON schema")
        return form

    @field_validator("think", mode="before")
    @classmethod
    def _yes_or_level(cls, think: Any) -> Any:
        if not isinstance(think, bool) and think not in ("low", "medium", "high"):
            raise wrong("must be true, false, 'low', 'medium' or 'high'")
        return think

    @property
    def shape(self) -> tuple[str, str] | None:
        """The field that constrains the answer, and the grammar's rule `body`; None without one."""
        if self.format is None:
            return None
        return "format", grammar.json_schema({"type": "object"} if self.format == "json" else self.format)

    def variables(self, source: str) -> dict[str, Any]:
        """Return the variables of the chat template. A template that cannot think need not be told not to."""
        if isinstance(self.think, str):
            return {"reasoning_effort": self.think}
        name = next((name for name in ("enable_thinking", "thinking") if has_variable(source, name)), "enable_thinking")
        return {name: self.think} if self.think or (self.think is False and has_variable(source, name)) else {}

    def sampled(self, answers: Answers, prompt: int, ends: list[int]) -> Sampled:
        """Return the request in the form that `Answers.run` takes. `num_ctx` bounds prompt and answer together."""
        context, length = self.options.num_ctx, self.options.num_predict
        if context is not None:
            self.options.require_context(answers)
            if prompt >= context:
                message = f"options.num_ctx is {context}; the prompt has {prompt} tokens"
                raise Refusal(400, message, "context_length_exceeded", param="options.num_ctx")
            length = min(length or answers.settings.answer, context - prompt)
        given = {"model": known(answers, self.model), "max_tokens": length, "stop_token_ids": ends}
        return Sampled.model_validate({**given, **self.options.sampling()})


class CalledName(Fields):
    """A called function."""

    name: str
    arguments: dict[str, Any] = Field({})
    index: int | None = None


class Call(Fields):
    """A call of a function."""

    function: CalledName
    id: str | None = None


class Message(Fields):
    """A message of a chat."""

    neutral: ClassVar = {"images": ([],), "tool_calls": ([],), "thinking": ("",)}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[Call] = Field([])
    tool_name: str | None = None
    tool_call_id: str | None = None

    def plain(self) -> dict[str, Any]:
        """Return the message in the form of chat templates."""
        plain: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            plain["tool_calls"] = [
                {"type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
                for call in self.tool_calls
            ]
        if self.thinking is not None:
            plain |= {"reasoning_content": self.thinking, "thinking": self.thinking}
        named = {"name": self.tool_name, "tool_call_id": self.tool_call_id}
        return {**plain, **{name: value for name, value in named.items() if value is not None}}


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str = ""
    parameters: dict[str, Any] = Field({})


class Tool(Fields):
    """A tool."""

    type: Literal["function"] = "function"
    function: Function


class ChatRequest(Asked):
    """A chat. Without messages, it only loads the model."""

    neutral: ClassVar = {**Asked.neutral, "tools": ([],)}

    messages: list[Message] = Field([])
    tools: list[Tool] = Field([], max_length=512)


class GenerateRequest(Asked):
    """A prompt. Without one, the request only loads the model."""

    neutral: ClassVar = {**Asked.neutral, "context": ([],), "suffix": ("",), "template": ("",), "system": ("",)}

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False


class ShowRequest(Fields):
    """A model to describe. `verbose` adds nothing here, and `name` is the former name of `model`."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


async def chat(answers: Answers, request: HttpRequest) -> Any:
    """Answer a chat."""
    body = await read(request, ChatRequest)
    known(answers, body.model)
    if not body.messages:
        return _loaded(body.model, message={"role": "assistant", "content": ""})
    messages = [message.plain() for message in body.messages]
    tools = [{"type": "function", "function": tool.function.model_dump()} for tool in body.tools]
    variables = body.variables(_template(answers))
    turn = Turn(messages, tools, variables=variables, shape=body.shape, params=_params(variables))
    return await _chatted(answers, request, body, turn, _message)


async def generate(answers: Answers, request: HttpRequest) -> Any:
    """Answer a prompt as a user's message, or continue it if the model has no chat template or `raw` is set."""
    body = await read(request, GenerateRequest)
    name = known(answers, body.model)
    if not body.prompt and body.suffix is None:
        return _loaded(body.model, response="")
    source = _template(answers)
    if body.suffix is None and not body.raw and source:
        messages = [{"role": "user", "content": body.prompt}]
        if body.system is not None:
            messages.insert(0, {"role": "system", "content": body.system})
        variables = body.variables(source)
        params = {**_params(variables), "messages": "prompt"}
        turn = Turn(messages, variables=variables, shape=body.shape, params=params)
        return await _chatted(answers, request, body, turn, _response)
    for param, is_given in (("system", body.system is not None), ("think", bool(body.think))):
        if is_given:
            message = f"{param} is not supported without a chat template"
            raise Refusal(400, message, "unsupported_parameter", param=param)
    ends: list[int] = []
    if body.suffix is None:
        ids = await answers.ids(body.prompt, "prompt")
    else:
        try:
            ids, ends = infill_ids(answers.engine.tokenizer, body.prompt, body.suffix, ("suffix", "suffix"))
        except ValueError as error:
            raise Refusal(400, str(error), "invalid_prompt", param="prompt") from error
    shape = body.shape
    lark = None if shape is None else (shape[0], grammar.plain(shape[1]))
    started = time.monotonic_ns()
    await answers.compile(lark)
    running = answers.run(body.sampled(answers, len(ids), ends), [ids], "prompt", lark=lark)
    return await _answered(request, body, running, _Writer(name, started, _response))


def _params(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the fields of a request that set variables of the template."""
    return {f"variables.{name}": "think" for name in variables}


async def _chatted(answers: Answers, request: HttpRequest, body: Asked, turn: Turn, form: "Form") -> Any:
    """Answer a turn."""
    started = time.monotonic_ns()
    prepared = await prepare(answers, turn)
    sampled = body.sampled(answers, len(prepared.ids), [])
    running = answers.run(sampled, [prepared.ids], turn.param("messages"), lark=prepared.lark)
    return await _answered(request, body, running, _Writer(sampled.model, started, form, prepared))


async def _answered(request: HttpRequest, body: Asked, running: Running, writer: "_Writer") -> Any:
    """Return the answer, streamed or not."""
    if body.stream:
        return streamed(running, writer.lines(running), lambda refusal: _line(refusal.ollama), LINES, alive=b"")
    (found,) = await running.whole(request)
    return {**writer.part(writer.text(found.text)), **writer.end(running, found.last)}


Form = Callable[[ChatText], dict[str, Any]]


def _message(text: ChatText) -> dict[str, Any]:
    """Return a part of a chat."""
    message: dict[str, Any] = {"role": "assistant", "content": text.content}
    if text.reasoning:
        message["thinking"] = text.reasoning
    if text.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": _arguments(call.arguments)}} for call in text.calls
        ]
    return {"message": message}


def _response(text: ChatText) -> dict[str, Any]:
    """Return a part of a completion."""
    thinking = {"thinking": text.reasoning} if text.reasoning else {}
    return {"response": text.content, **thinking}


def _arguments(text: str) -> Any:
    """Return the arguments of a call as an object. What a model writes need not be JSON."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {"arguments": text}


class _Writer:
    """Writes an answer in ollama's form. An answer without a prepared turn has only content."""

    def __init__(self, name: str, started: int, form: Form, prepared: Prepared | None = None) -> None:
        self._name, self._started, self._form, self._prepared = name, started, form, prepared

    def text(self, text: str) -> ChatText:
        """Return the parts of a whole answer."""
        return ChatText(content=text) if self._prepared is None else texts(self._prepared, text)

    async def lines(self, running: Running) -> AsyncIterator[bytes]:
        """Yield the parts of an answer; the last says how it ended."""
        async for text, piece in self._parts(running):
            if text.content or text.reasoning or text.calls:
                yield _line(self.part(text))
            if piece.finish is not None:
                yield _line({**self.part(ChatText()), **self.end(running, piece)})

    async def _parts(self, running: Running) -> AsyncIterator[tuple[ChatText, Piece]]:
        """Yield the parts of an answer. ollama sends calls as a whole, so they come at the end."""
        if self._prepared is None:
            async for _, piece in running.pieces():
                yield ChatText(content=piece.text), piece
            return
        whole = ChatText()
        async for part in parts(running, self._prepared):
            new = ChatText()
            for delta in part.deltas:
                whole.add(delta)
                new.reasoning += delta.reasoning
                new.content += delta.content
            if part.finish is not None:
                new.calls = whole.calls
            yield new, part.piece

    def part(self, text: ChatText) -> dict[str, Any]:
        """Return a part of an answer."""
        return {"model": self._name, "created_at": _now(), **self._form(text), "done": False}

    def end(self, running: Running, last: Piece) -> dict[str, Any]:
        """Return how an answer ended. Times are in nanoseconds."""
        now = time.monotonic_ns()
        first = running.begun or now
        return {
            "done": True,
            "done_reason": last.finish,
            "total_duration": now - self._started,
            "load_duration": 0,
            "prompt_eval_count": running.prompt,
            "prompt_eval_duration": first - self._started,
            "eval_count": last.tokens,
            "eval_duration": now - first,
        }


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode() + b"\n"


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _loaded(name: str, **text: Any) -> dict[str, Any]:
    """Return the answer to a request without a prompt, which loads a model in ollama. It is always loaded here."""
    return {"model": name, "created_at": _now(), **text, "done": True, "done_reason": "load"}


def known(answers: Answers, name: str) -> str:
    """Return the name of a model without the tag that clients add."""
    if name not in answers.models:
        name = name.removesuffix(LATEST)
    answers.require_model(name)
    return name


def _template(answers: Answers) -> str:
    return template(answers.engine.tokenizer, Chat([], template=answers.settings.template))


def _details(answers: Answers) -> dict[str, Any]:
    config = answers.engine.model.config
    quantization = getattr(config, "quantization_config", None)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": config.model_type,
        "families": [config.model_type],
        "parameter_size": "",
        "quantization_level": "packed" if quantization is not None else str(config.dtype).removeprefix("torch."),
    }


def _entries(answers: Answers) -> list[dict[str, Any]]:
    source = answers.settings.source
    files = [] if source is None else [source / name for name in weight_files(source)]
    digest = hashlib.sha256(repr(fingerprint(source)).encode()).hexdigest()
    common = {"size": sum(file.stat().st_size for file in files), "digest": digest, "details": _details(answers)}
    return [{"name": f"{name}{LATEST}", "model": f"{name}{LATEST}", **common} for name in answers.models]


def tags(answers: Answers) -> dict[str, Any]:
    """Return the models."""
    started = datetime.fromtimestamp(answers.created, UTC).isoformat().replace("+00:00", "Z")
    return {"models": [{**entry, "modified_at": started} for entry in _entries(answers)]}


def running_models(answers: Answers) -> dict[str, Any]:
    """Return the loaded models, which are all."""
    never = datetime(9999, 1, 1, tzinfo=UTC).isoformat().replace("+00:00", "Z")
    context = answers.engine.context
    entries = [{**entry, "expires_at": never, "size_vram": 0, "context_length": context} for entry in _entries(answers)]
    return {"models": entries}


async def show(answers: Answers, request: HttpRequest) -> Any:
    """Describe a model."""
    body = await read(request, ShowRequest)
    name = body.model or body.name
    if name is None:
        raise Refusal(400, "model is required", "missing_required_parameter", param="model")
    known(answers, name)
    source = _template(answers)
    kind = answers.engine.model.config.model_type
    can_infill = True
    try:
        infill_ids(answers.engine.tokenizer, "", "", ("suffix", "suffix"))
    except Refusal:
        can_infill = False
    abilities = [
        ("completion", True),
        ("tools", has_variable(source, "tools")),
        ("insert", can_infill),
        ("thinking", has_variable(source, "enable_thinking") or has_variable(source, "reasoning_effort")),
    ]
    return {
        "modelfile": "",
        "parameters": "",
        "template": source,
        "details": _details(answers),
        "model_info": {"general.architecture": kind, f"{kind}.context_length": answers.engine.context},
        "capabilities": [ability for ability, is_there in abilities if is_there],
    }
