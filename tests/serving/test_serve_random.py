"""Random requests to every endpoint with a body: each is answered, or refused in form; none is a defect."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("openai")
pytest.importorskip("fastapi")

from test_serve_requests import values

from moepack.serving.http.anthropic_messages import CountRequest, MessagesRequest
from moepack.serving.http.openai_embeddings import EmbeddingRequest
from moepack.serving.http.openai_responses import ResponsesRequest
from moepack.serving.http.tokens import DetokenizeRequest, TokenizeRequest

TEXTS = st.sampled_from(["x", "", "</s>", "<think>", "a\0"])
SCHEMAS = st.sampled_from([{}, {"type": "object"}, {"type": "x"}, {"$ref": "#/nothing"}, {"enum": ["a"]}])
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
        optional={"text": TEXTS, "id": TEXTS, "name": TEXTS, "input": st.just({}), "tool_use_id": TEXTS,
                  "content": TEXTS, "thinking": TEXTS, "signature": TEXTS, "is_error": st.booleans()},
    ),
    max_size=2,
)  # fmt: skip
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"]),
                  "role": st.sampled_from(["user", "assistant", "system", "developer"]), "content": TEXTS,
                  "call_id": TEXTS, "name": TEXTS, "arguments": st.sampled_from(["{}", "[", "", "5"]),
                  "output": TEXTS, "summary": st.just([])},
    ),
    max_size=3,
)  # fmt: skip
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS | BLOCKS}),
    max_size=3,
)
LIKELY = {
    "messages": MESSAGES, "system": TEXTS | BLOCKS, "input": TEXTS | ITEMS | st.lists(TEXTS, max_size=2) | st.lists(
        st.integers(-1, 300), max_size=3), "max_tokens": st.integers(0, 3), "max_output_tokens": st.integers(0, 3),
    "tools": st.lists(st.fixed_dictionaries({"name": TEXTS, "type": st.sampled_from(["function", "custom"])},
                                            optional={"input_schema": SCHEMAS, "parameters": SCHEMAS}), max_size=1),
    "tool_choice": st.sampled_from(["auto", "required", {"type": "any"}, {"type": "tool"}, {"type": "function"}]),
    "thinking": st.fixed_dictionaries({"type": st.sampled_from(["enabled", "disabled"])},
                                      optional={"budget_tokens": st.integers(0, 2)}),
    "output_config": st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": st.just("json_schema"),
                                                                             "schema": SCHEMAS})}),
    "text": st.fixed_dictionaries({"format": st.fixed_dictionaries({"type": st.sampled_from(["text", "json_schema",
                                   "json_object"])}, optional={"schema": SCHEMAS})}),
    "tokens": st.lists(st.integers(-1, 300), max_size=3), "dimensions": st.sampled_from([1, 64]),
    "prompt": TEXTS, "content": TEXTS, "stream": st.booleans(),
}  # fmt: skip
ENDPOINTS = {
    "/v1/responses": (ResponsesRequest, {"model": "tiny", "input": "x", "max_output_tokens": 1}),
    "/v1/messages": (
        MessagesRequest,
        {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    ),
    "/v1/messages/count_tokens": (CountRequest, {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}),
    "/v1/embeddings": (EmbeddingRequest, {"model": "tiny", "input": "x"}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [5]}),
}


@st.composite
def requests(draw):
    path = draw(st.sampled_from(sorted(ENDPOINTS)))
    kind, body = ENDPOINTS[path]
    body = dict(body)
    names = [field.alias or name for name, field in kind.model_fields.items()]
    for name in draw(st.lists(st.sampled_from([*names, *kind.neutral, "surprise"]), max_size=3)):
        neutral = st.sampled_from(kind.neutral.get(name, (None,)))
        body[name] = draw(LIKELY.get(name, values) | LIKELY.get(name, neutral) | neutral | values)
    return path, body


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_any_request_gets_a_well_formed_answer(ask, request):
    path, body = request
    status, _, content = ask(path, body)
    assert status in (200, 400, 404), (body, content)
    kind = ENDPOINTS[path][0]
    if status == 200:
        assert "surprise" not in body or body["surprise"] is None
        given = {name for name, value in body.items() if value is not None}
        assert given <= {*kind.model_fields, *kind.neutral}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_unknown_fields_are_refused_by_name(ask, path):
    for value in (0, "x", [1], {"a": 1}):
        status, _, content = ask(path, {**ENDPOINTS[path][1], "surprise": value})
        assert (status, content["error"]["param"]) == (400, "surprise")
