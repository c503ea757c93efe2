"""The requests that are answered: their fields, the types and ranges of these, and what each field means.

Invariant: every field of a request is honoured or refused by name, at every level. A field that these classes do not
declare is refused. Two groups of fields are accepted without any effect, and docs/serving.md lists both: fields that
cannot change an answer (`user`, `metadata`), and fields with a value that asks for nothing (`NEUTRAL`, and null).
Types are strict: no string or boolean is taken for a number.
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
"""Fields of a request that are refused, except with one of these values, which ask for nothing."""


class Fields(BaseModel):
    """An object of a request: declared fields are honoured, all others refused unless their value asks for nothing."""

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
        # Equal types, because 0 == False: `"logprobs": 0` asks for the logarithms of the chosen tokens.
        return value is None or any(type(value) is type(same) and value == same for same in cls.neutral.get(name, ()))


class StreamOptions(Fields):
    """What a stream says besides text."""

    neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}

    include_usage: bool = False


class Request(Fields):
    """The fields that completions and chats have in common; the last four cannot change an answer."""

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
        """The most tokens of the answer, if the client says it."""
        return self.max_tokens

    def settings(self) -> dict[str, Any]:
        """Return the fields of `Sampling` that are given."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        settings = {name: getattr(self, name) for name in names}
        return {**settings, "stop": tuple(self.stop)}


class CompletionRequest(Request):
    """Text to continue, as text or as tokens."""

    prompt: str | list[int]

    @field_validator("prompt", mode="before")
    @classmethod
    def _text_or_tokens(cls, prompt: Any) -> Any:
        # Checked here, because pydantic's errors of a union name its branches, which no client has written.
        if isinstance(prompt, str) or (isinstance(prompt, list) and all(type(token) is int for token in prompt)):
            return prompt
        raise _wrong("must be a string or a list of tokens; several prompts need several requests")


class ContentPart(Fields):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(Fields):
    """What somebody said."""

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
        """Return the message as templates read it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": "".join(part.text for part in self.content)}


class ChatRequest(Request):
    """A chat whose next message is asked for."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @field_validator("max_completion_tokens")
    @classmethod
    def _one_length(cls, length: int | None, info: ValidationInfo) -> int | None:
        other = info.data.get("max_tokens")
        if length is not None and other is not None and other != length:
            raise _wrong("must be equal to max_tokens where both are given")
        return length

    @property
    def length(self) -> int | None:
        """The most tokens of the answer, if the client says it."""
        return self.max_completion_tokens or self.max_tokens


def _wrong(sentence: str) -> PydanticCustomError:
    """An error of a field, whose name comes before the sentence."""
    return PydanticCustomError("invalid_value", "{sentence}", {"sentence": sentence})
