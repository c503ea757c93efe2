"""The fields that constrain an answer, as OpenAI, vLLM and llama.cpp name them. At most one may be given."""

import json
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from moepack.serving.chat import grammar
from moepack.serving.http.refusal import Refusal
from moepack.serving.http.requests import Fields, Sampled, wrong

__all__ = ["Structured"]


class JsonSchema(Fields):
    """A named JSON schema. Neither the name nor the description changes an answer; schemas are always strict."""

    name: str = ""
    description: str = ""
    schema_: dict[str, Any] = Field({}, alias="schema")
    strict: bool = True


class ResponseFormat(Fields):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def body(self) -> str | None:
        """The grammar's rule for the answer; None for any text."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            return grammar.json_schema(self.schema_ or {"type": "object"})
        if self.json_schema is None:
            raise Refusal(
                400, "response_format.json_schema is required", "missing_required_parameter",
                param="response_format.json_schema",
            )  # fmt: skip
        return grammar.json_schema(self.json_schema.schema_)


class StructuredOutputs(Fields):
    """vLLM's `structured_outputs`."""

    neutral: ClassVar = {"json_object": (False,)}

    json_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None
    json_object: bool = False

    @field_validator("json_", mode="before")
    @classmethod
    def _object_or_text(cls, schema: Any) -> Any:
        return object_or_text(schema)


class Structured(Sampled):
    """A request whose answer may be constrained."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, min_length=1)
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @field_validator("guided_json", mode="before")
    @classmethod
    def _object_or_text(cls, schema: Any) -> Any:
        return object_or_text(schema)

    def constraint(self) -> tuple[str, str] | None:
        """Return the field that constrains the answer, and the grammar's rule `body`; None without one.

        Raises:
            Refusal: two fields constrain the answer, or one is not valid.
        """
        outputs = self.structured_outputs or StructuredOutputs.model_validate({})
        given: list[tuple[str, Any, Any]] = [
            ("guided_json", self.guided_json, _json), ("structured_outputs.json", outputs.json_, _json),
            ("json_schema", self.json_schema, _json),
            ("structured_outputs.json_object", outputs.json_object or None, lambda _: _json({"type": "object"})),
            ("guided_regex", self.guided_regex, grammar.regex),
            ("structured_outputs.regex", outputs.regex, grammar.regex),
            ("guided_choice", self.guided_choice, grammar.choice),
            ("structured_outputs.choice", outputs.choice, grammar.choice),
            ("guided_grammar", self.guided_grammar, grammar.from_grammar),
            ("grammar", self.grammar, grammar.from_grammar),
            ("structured_outputs.grammar", outputs.grammar, grammar.from_grammar),
        ]  # fmt: skip
        found = [(name, value, make) for name, value, make in given if value not in (None, "")]
        if self.response_format is not None and self.response_format.body is not None:
            found.append(("response_format", self.response_format, lambda form: form.body))
        if len(found) > 1:
            message = f"{found[1][0]} cannot be combined with {found[0][0]}"
            raise Refusal(400, message, "invalid_value", param=found[1][0])
        for name, value, make in found:
            try:
                return name, make(value)
            except ValueError as error:
                raise Refusal(400, f"{name} {error}", "invalid_value", param=name) from error
        return None


def object_or_text(schema: Any) -> Any:
    """Return a schema, given as an object or as JSON text."""
    if not isinstance(schema, dict | str):
        raise wrong("must be an object, or its JSON as a string")
    return schema


def _json(schema: Any) -> str:
    """Return the rule for a schema given as an object or as text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError as error:
            raise ValueError("is not JSON") from error
        if not isinstance(schema, dict | bool):
            raise ValueError("must be a JSON schema")
    return grammar.json_schema(schema)
