"""What OpenAI's interface lets a client ask for, as far as moepack answers it.

Fields that change the answer and are not supported are refused, unless they have the value that changes nothing;
fields that are unknown, or mean nothing here (`user`, `store`, `metadata`), are ignored.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = ["ChatRequest", "CompletionRequest", "Request"]

_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}
"""Fields that are refused, with the values that change nothing; so does null."""


class StreamOptions(BaseModel):
    """What a stream says besides text."""

    include_usage: bool = False


class Request(BaseModel):
    """What both kinds of requests have in common."""

    model_config = ConfigDict(extra="allow", strict=False)

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: list[str] | None = Field(None, max_length=16)

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: list[str] | None) -> list[str] | None:
        if stop is not None and not all(0 < len(string) <= 1000 for string in stop):
            raise ValueError("a stop string has 1 to 1000 characters")
        return stop

    @model_validator(mode="after")
    def _refuse(self) -> "Request":
        for name, value in (self.model_extra or {}).items():
            if name in _REFUSED and value is not None and value not in _REFUSED[name]:
                raise ValueError(f"{name} is not supported")
        return self

    def settings(self) -> dict[str, Any]:
        """The fields of `Sampling` that are given."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")
        settings = {name: getattr(self, name) for name in names}
        return {**settings, "stop": tuple(self.stop or ())}


class CompletionRequest(Request):
    """Text to continue, as text or as tokens."""

    prompt: str | list[int]


class ContentPart(BaseModel):
    """A part of a message; text is the only kind."""

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """What somebody said."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]

    def plain(self) -> dict[str, str]:
        """The message as templates read it."""
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return {"role": "system" if self.role == "developer" else self.role, "content": "".join(parts)}


class ChatRequest(Request):
    """A chat whose next message is asked for."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
