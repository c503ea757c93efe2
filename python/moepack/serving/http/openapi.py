"""The OpenAPI description of the server: requests from the tables of fields, and the fields of every answer.

It is at `/openapi.json`, for programs that generate clients or tests. Failures have one form for each protocol.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from moepack import __version__
from moepack.serving.http import llamacpp, ollama, ollama_embeddings
from moepack.serving.http.anthropic_messages import CountRequest, MessagesRequest
from moepack.serving.http.openai_chat import ChatRequest
from moepack.serving.http.openai_completions import CompletionRequest
from moepack.serving.http.openai_embeddings import EmbeddingRequest
from moepack.serving.http.openai_responses import ResponsesRequest
from moepack.serving.http.requests import TEXT
from moepack.serving.http.tokens import DetokenizeRequest, TokenizeRequest

__all__ = ["BODIES", "GETS", "description"]

Schema = dict[str, Any]

NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
YES_NO: Schema = {"type": "boolean"}
ANY: Schema = {}
STREAMS = {"/api/chat": "application/x-ndjson", "/api/generate": "application/x-ndjson"}
"""Content types of streams other than server-sent events."""


def _object(**fields: Schema) -> Schema:
    """Describe an object with at least these fields."""
    return {"type": "object", "properties": fields, "required": [*fields]}


def _list(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def _const(value: Any) -> Schema:
    return {"const": value}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


FINISH = _or_null({"enum": ["stop", "length", "tool_calls"]})
USAGE = _object(prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT)
MODEL = _object(id=TEXT, object=_const("model"), created=COUNT, owned_by=TEXT, max_model_len=COUNT)
OLLAMA_MODEL = _object(name=TEXT, model=TEXT, size=COUNT, digest=TEXT, details=_object(family=TEXT))
OLLAMA_END = {"model": TEXT, "created_at": TEXT, "done": YES_NO, "done_reason": TEXT}
CONTINUED = _object(content=TEXT, stop=YES_NO, tokens_predicted=COUNT, tokens_evaluated=COUNT, stop_type=TEXT)

BODIES: dict[str, tuple[type[BaseModel], Schema]] = {
    "/v1/completions": (CompletionRequest, _object(
        id=TEXT, object=_const("text_completion"), created=COUNT, model=TEXT, usage=USAGE,
        choices=_list(_object(index=COUNT, text=TEXT, finish_reason=FINISH)))),
    "/v1/chat/completions": (ChatRequest, _object(
        id=TEXT, object=_const("chat.completion"), created=COUNT, model=TEXT, usage=USAGE,
        choices=_list(_object(index=COUNT, finish_reason=FINISH,
                              message=_object(role=_const("assistant"), content=_or_null(TEXT)))))),
    "/v1/responses": (ResponsesRequest, _object(
        id=TEXT, object=_const("response"), status={"enum": ["completed", "incomplete"]}, model=TEXT,
        output=_list(_object(type=TEXT, id=TEXT)), usage=_object(input_tokens=COUNT, output_tokens=COUNT))),
    "/v1/embeddings": (EmbeddingRequest, _object(
        object=_const("list"), model=TEXT, usage=_object(prompt_tokens=COUNT),
        data=_list(_object(index=COUNT, embedding={"anyOf": [_list(NUMBER), TEXT]})))),
    "/v1/messages": (MessagesRequest, _object(
        id=TEXT, type=_const("message"), role=_const("assistant"), model=TEXT, content=_list(_object(type=TEXT)),
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]}, stop_sequence=_or_null(TEXT),
        usage=_object(input_tokens=COUNT, output_tokens=COUNT))),
    "/v1/messages/count_tokens": (CountRequest, _object(input_tokens=COUNT)),
    "/tokenize": (TokenizeRequest, _object(count=COUNT, max_model_len=COUNT, tokens=_list(ANY))),
    "/detokenize": (DetokenizeRequest, _object(prompt=TEXT, content=TEXT)),
    "/completion": (llamacpp.CompletionRequest, CONTINUED),
    "/infill": (llamacpp.InfillRequest, CONTINUED),
    "/api/chat": (ollama.ChatRequest, _object(**OLLAMA_END, message=_object(role=_const("assistant"), content=TEXT))),
    "/api/generate": (ollama.GenerateRequest, _object(**OLLAMA_END, response=TEXT)),
    "/api/show": (ollama.ShowRequest, _object(template=TEXT, details=_object(family=TEXT), capabilities=_list(TEXT))),
    "/api/embed": (ollama_embeddings.EmbedRequest, _object(
        model=TEXT, embeddings=_list(_list(NUMBER)), prompt_eval_count=COUNT)),
    "/api/embeddings": (ollama_embeddings.EmbeddingsRequest, _object(embedding=_list(NUMBER))),
}  # fmt: skip
"""The fields and the answer of every endpoint that takes a body."""

GETS: dict[str, Schema] = {
    "/health": _object(status=_const("ok")),
    "/v1/models": _object(object=_const("list"), data=_list(MODEL)),
    "/v1/models/{name}": MODEL,
    "/props": _object(default_generation_settings=_object(n_ctx=COUNT), total_slots=COUNT, chat_template=TEXT),
    "/slots": _list(_object(id=COUNT, n_ctx=COUNT, is_processing=YES_NO)),
    "/api/tags": _object(models=_list(OLLAMA_MODEL)),
    "/api/ps": _object(models=_list(OLLAMA_MODEL)),
    "/api/version": _object(version=TEXT),
    "/openapi.json": _object(openapi=TEXT, paths=_object()),
    "/metrics": TEXT,
}
"""The answer of every endpoint that takes none."""


def description(names: Sequence[str]) -> Schema:
    """Return the description, version 3.1, of a server whose models have these names."""
    bodies = dict.fromkeys(body for body, _ in BODIES.values())
    refs, parts = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    for schema in parts["$defs"].values():
        if schema.get("properties", {}).get("model", {}).get("type") == "string":
            schema["properties"]["model"] = {"enum": [*names]}
    paths: Schema = {path: {"get": _operation(path, answer)} for path, answer in GETS.items()}
    for path, (body, answer) in BODIES.items():
        content = {"application/json": {"schema": refs[body, "validation"]}}
        operation = _operation(path, answer)
        if "stream" in body.model_fields:
            operation["responses"]["200"]["content"][STREAMS.get(path, "text/event-stream")] = {"schema": TEXT}
        paths[path] = {"post": {**operation, "requestBody": {"required": True, "content": content}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "moepack", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": parts["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, answer: Schema) -> Schema:
    """Describe the answers of an endpoint."""
    kind = "text/plain" if path == "/metrics" else "application/json"
    error = TEXT if path.startswith("/api/") else _object(message=TEXT, type=TEXT, param=_or_null(TEXT), code=TEXT)
    failure = {"description": "a failure", "content": {"application/json": {"schema": _object(error=error)}}}
    operation: Schema = {
        "responses": {
            "200": {"description": "the answer", "content": {kind: {"schema": answer}}},
            "4XX": failure,
            "5XX": failure,
        }
    }
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": TEXT}]
    return operation
