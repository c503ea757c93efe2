"""The fields that requests of several protocols share, with types and ranges.

Invariant: every field of a request, at every level, is either honoured or rejected by name. Undeclared fields are
rejected. Two groups of fields are accepted and ignored (listed in docs/serving.md): fields that cannot change an answer
(`user`, `metadata`), and fields with a neutral value (`NEUTRAL`, and null). Types are strict: strings and booleans are
not converted to numbers.
"""

from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

__all__ = ["NEUTRAL", "SAMPLERS", "TEXT", "Fields", "OneOrManyStops", "Sampled", "Stops", "StreamOptions", "wrong"]

SAMPLERS: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "tfs_z": (1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1,),
    "min_keep": (0,),
}
"""llama.cpp's samplers that are not supported, and the values that turn them off."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "max_tokens": (-1,),
    "seed": (-1,),
    "stop": ("",),
    "top_k": (-1,),
    "use_beam_search": (False,),
    "include_stop_str_in_output": (False,),
    "return_tokens_as_token_ids": (False,),
    "length_penalty": (1,),
    "priority": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "return_token_ids": (False,),
    "bad_words": ([],),
    "logits_processors": ([],),
    "documents": ([],),
    "verbosity": ("medium",),
    "reasoning_format": ("auto", "deepseek"),
    "parse_tool_calls": (True,),
    "thinking_forced_open": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "id_slot": (-1,),
    "n_predict": (-1,),
    "n_probs": (0,),
    "n_keep": (0,),
    "t_max_predict_ms": (0, -1),
    "repeat_penalty": (1,),
    **SAMPLERS,
}
"""Unsupported fields, and values of supported ones, that ask for nothing. They are accepted and ignored."""

TEXT = {"type": "string"}
"""The JSON schema of a text, a form of many fields."""

MOST_CHOICES = 128
"""Maximum answers per request."""


def wrong(sentence: str) -> PydanticCustomError:
    """Return an error for a field. The field's name is put before the sentence."""
    return PydanticCustomError("invalid_value", "{sentence}", {"sentence": sentence})


def _text_or_many(given: Any) -> Any:
    """Return a list for a string or a list."""
    if not isinstance(given, str | list):
        raise wrong("must be a string or a list of strings")
    return [given] if isinstance(given, str) else given


def _not_empty(strings: list[str]) -> list[str]:
    if not all(0 < len(string) <= 1000 for string in strings):
        raise wrong("must have strings of 1 to 1000 characters")
    return strings


Stops = Annotated[list[str], Field(max_length=16), AfterValidator(_not_empty)]
"""Strings that end an answer."""

OneOrManyStops = Annotated[Stops, BeforeValidator(_text_or_many)]
"""Strings that end an answer, or a single one."""


class Fields(BaseModel):
    """An object of a request. Declared fields are honoured; others are rejected unless their value is neutral."""

    model_config = ConfigDict(extra="forbid", strict=True)
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    forms: ClassVar[dict[str, Any]] = {}
    """Other forms of fields, as JSON schemas."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Return the schema for clients, with other forms and neutral values."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        required, fields = schema.get("required", []), schema.setdefault("properties", {})
        for name in {**fields, **cls.neutral}:
            forms = [fields[name]] if name in fields else []
            forms += [cls.forms[name]] if name in cls.forms else []
            forms += [] if name in required else [{"enum": [*cls.neutral.get(name, ()), None]}]
            fields[name] = {"anyOf": forms} if len(forms) > 1 else forms[0]
        return schema

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

    neutral = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Sampled(Fields):
    """The fields of every request that generates. Those from `user` on cannot change an answer."""

    neutral = NEUTRAL
    forms = {"stop": TEXT}

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] = {}
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: OneOrManyStops = Field([])
    stop_token_ids: list[int] = Field([], max_length=1024)
    ignore_eos: bool = False
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    user: str = ""
    metadata: dict[str, Any] = {}
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    cache_prompt: bool = True
    request_id: str = ""
    guided_decoding_backend: str = ""

    @field_validator("logit_bias")
    @classmethod
    def _are_tokens(cls, bias: dict[str, float]) -> dict[str, float]:
        if len(bias) > 1024:
            raise wrong("must have at most 1024 elements")
        if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in bias):
            raise wrong("must have token ids as names")
        if not all(-100 <= value <= 100 for value in bias.values()):
            raise wrong("must have values from -100 to 100")
        return bias

    @field_validator("stop_token_ids")
    @classmethod
    def _are_ids(cls, ids: list[int]) -> list[int]:
        if not all(0 <= token < 2**31 for token in ids):
            raise wrong("must have token ids")
        return ids

    @property
    def length(self) -> int | None:
        """Maximum number of answer tokens, or None if the client sets none."""
        return self.max_tokens

    @property
    def choices(self) -> int:
        """Number of answers to generate per prompt."""
        return self.n

    def settings(self) -> dict[str, Any]:
        """Return the fields of `Sampling`; None for those that the request does not set."""
        names = ("temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "presence_penalty",
                 "frequency_penalty", "min_tokens", "ignore_eos", "seed")  # fmt: skip
        return {
            **{name: getattr(self, name) for name in names if name in self.model_fields_set},
            "logit_bias": tuple((int(token), value) for token, value in self.logit_bias.items()),
            "stop_token_ids": tuple(self.stop_token_ids),
            "stop": tuple(self.stop),
        }
