"""Sampling options as llama.cpp and ollama name them."""

from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from moepack.serving.http.requests import SAMPLERS, TEXT, Fields, OneOrManyStops, wrong

__all__ = ["LlamaOptions"]


class LlamaOptions(Fields):
    """The options that both have."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "seed": (-1,),
        "top_k": (-1,),
        "stop": ("", []),
        **SAMPLERS,
    }
    forms: ClassVar[dict[str, Any]] = {"stop": TEXT}

    temperature: float | None = Field(None, ge=0, le=100)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: float | None = Field(None, gt=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_last_n: int | None = Field(None, ge=-1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: OneOrManyStops = Field([])

    @field_validator("repeat_last_n")
    @classmethod
    def _whole_text(cls, window: int | None, info: ValidationInfo) -> int | None:
        """Penalties count all tokens here, so a window is supported if nothing is penalized."""
        penalties = [info.data.get(name) for name in ("presence_penalty", "frequency_penalty")]
        penalizes = any(penalties) or info.data.get("repeat_penalty") not in (None, 1)
        if window and window > 0 and penalizes:
            raise wrong("must be -1 with a penalty: penalties count all tokens")
        return window

    def sampling(self) -> dict[str, Any]:
        """Return the options that are set, as `Sampled` names them. A window of 0 tokens turns penalties off."""
        names = {"repeat_penalty": "repetition_penalty"}
        found = {
            names.get(name, name): value
            for name in LlamaOptions.model_fields
            if name != "repeat_last_n" and (value := getattr(self, name)) is not None
        }
        if self.repeat_last_n == 0:
            found |= {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
        return found
