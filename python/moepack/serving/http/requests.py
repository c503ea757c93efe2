"""The supported requests: their fields, with types and ranges.

Invariant: every field of a request, at every level, is either honoured or rejected by name. Undeclared fields are
rejected. Two groups of fields are accepted and ignored (listed in docs/serving.md): fields that cannot change an answer
(`user`, `metadata`), and fields with a neutral value (`NEUTRAL`, and null). Types are strict: strings and booleans are
not converted to numbers.
"""

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

__all__ = ["NEUTRAL", "ChatRequest", "CompletionRequest", "Request"]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Unsupported fields with the neutral values that are accepted and ignored. All other values are rejected."""


class Fields(BaseModel):
    """An object of a request. Declared fields are honoured; others are rejected unless their value is neutral."""

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if not cls._asks_for_nothing(name, value)}

    @classmethod
    def _asks_for_nothing(cls, name: str, value: Any) -> bool:
        # Compare types too, because 0 == False: `"logprobs": 0` requests the logarithms of the chosen tokens.
        return value is None or any(type(value) is type(same) and value == same for same in cls.neutral.get(name, ()))


class StreamOptions(Fields):
    """Options of a stream."""

    neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = False


class Request(Fields):
    """The fields shared by completions and chats. The last four cannot change an answer."""

    neutral = NEUTRAL

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[str] = Field([], max_length=16)
    user: str = ""
    metadata: dict[str, Any] = {}
    safety_identifier: str = ""
    prompt_cache_key: str = ""

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, stop: Any) -> Any:
        if not isinstance(stop, str | list):
            raise _wrong("must be a string or a list of strings")
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: list[str]) -> list[str]:
        if not all(0 < len(string) <= 1000 for string in stop):
            raise _wrong("must have strings of 1 to 1000 characters")
        return stop

    @property
    def length(self) -> int | None:
        """Maximum number of answer tokens, or None if the client sets none."""
        return self.max_tokens

    def settings(self) -> dict[str, Any]:
        """Return the fields of `Sampling`; None for those that the request does not set."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        settings = {name: getattr(self, name) for name in names}
        return {**settings, "stop": tuple(self.stop)}


class CompletionRequest(Request):
    """A completion request. The prompt is text or token ids."""

    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_tokens(cls, prompt: Any) -> Any:
        # Checked here because pydantic's errors for a union name its branches, which clients do not know.
        if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
            return prompt
        raise _wrong("must be a string or a list of tokens; several prompts need several requests")


class ContentPart(Fields):
    """A part of a message. Only text is supported."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """A message of a chat."""

    neutral = {"tool_calls": ([],), "annotations": ([],)}

    role: Literal["system", "developer", "user", "assistant"]
    content: list[ContentPart] = Field(min_length=1)

    @field_validator("content", mode="before")
    @classmethod
    def _text_or_parts(cls, content: Any) -> Any:
        if not isinstance(content, str | list):
            raise _wrong("must be a string or a list of parts")
        return [{"type": "text", "text": content}] if isinstance(content, str) else content

    def plain(self) -> dict[str, str]:
        """Return the message in the form of chat templates."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatRequest(Request):
    """A chat completion request."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_length(cls, length: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if length is not None and other is not None and other != length:
            raise _wrong("must equal max_tokens if both are given")
        return length

    @property
    def length(self) -> int | None:
        """Maximum number of answer tokens, or None if the client sets none."""
        return self.max_completion_tokens or self.max_tokens


def _wrong(sentence: str) -> PydanticCustomError:
    """Return an error for a field. The field's name is put before the sentence."""
    return PydanticCustomError("invalid_value", "{sentence}", {"sentence": sentence})
