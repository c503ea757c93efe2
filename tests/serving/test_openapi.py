"""`/openapi.json` describes every endpoint, every field and every answer."""

import pytest

pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("jsonschema")

import jsonschema
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_serve_random import ENDPOINTS, LIKELY
from test_serve_requests import CHATS, COMPLETIONS, values

from moepack.serving.http.openapi import BODIES, GETS, description
from moepack.serving.http.page import PATHS
from moepack.serving.http.server import POST, Settings, create_app

DESCRIPTION = description(["tiny"])
MESSAGES = [{"role": "user", "content": "x"}]
VALID = {
    **{path: body for path, (_, body) in ENDPOINTS.items()},
    COMPLETIONS: {"model": "tiny", "prompt": "x", "max_tokens": 1},
    CHATS: {"model": "tiny", "messages": MESSAGES, "max_tokens": 1},
    "/completion": {"prompt": "x", "n_predict": 1},
    "/infill": {"input_prefix": "x", "input_suffix": "y", "n_predict": 1},
    "/api/chat": {"model": "tiny", "messages": MESSAGES, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"model": "tiny", "prompt": "x", "stream": False, "options": {"num_predict": 1}},
    "/api/show": {"model": "tiny"},
    "/api/embed": {"model": "tiny", "input": "x"},
    "/api/embeddings": {"model": "tiny", "prompt": "x"},
}
"""A request of each endpoint."""


def fits(content, schema):
    whole = {**schema, "components": DESCRIPTION["components"]}
    jsonschema.Draft202012Validator(whole).validate(content)


def check(path, status, headers, content):
    """Compare an answer with its description."""
    assert status != 500
    operations = DESCRIPTION["paths"][path]
    answers = next(iter(operations.values()))["responses"]
    described = answers.get(str(status)) or answers[f"{status // 100}XX"]
    fits(content, described["content"][headers["content-type"].partition(";")[0]]["schema"])


def test_every_endpoint_is_described(engine):
    routes = [route for route in create_app(engine, Settings("tiny")).routes if isinstance(route, APIRoute)]
    paths = {route.path.replace("{name:path}", "{name}") for route in routes}
    assert set(DESCRIPTION["paths"]) == paths - set(PATHS)
    assert set(BODIES) == set(POST) == set(VALID)


@pytest.mark.parametrize("path", [path for path in GETS if path != "/metrics"])
def test_descriptions_of_the_server_fit(ask, path):
    check(path, *ask(path.replace("{name}", "tiny")))


@pytest.mark.parametrize("path", VALID)
def test_answers_and_refusals_fit(ask, path):
    schema = DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fits(VALID[path], schema)
    if path != "/infill":  # refused: the tokenizer has no tokens for it
        status, headers, content = ask(path, VALID[path])
        assert status == 200, content
        check(path, status, headers, content)
    with pytest.raises(jsonschema.ValidationError):
        fits({**VALID[path], "surprise": 1}, schema)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHATS, {"stop": "x", "tool_choice": "none", "seed": -1, "tools": []}),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}], "temperature": None}),
        (CHATS, {"skip_special_tokens": True, "mirostat": 0, "xtc_probability": 0, "reasoning_format": "auto"}),
        (COMPLETIONS, {"spaces_between_special_tokens": True, "bad_words": [], "dry_multiplier": 0, "id_slot": -1}),
        (COMPLETIONS, {"stop": ["x"], "use_beam_search": False, "suffix": ""}),
        ("/v1/responses", {"input": "x", "store": False}),
        ("/v1/messages", {"system": "x"}),
        ("/completion", {"logit_bias": [[5, 1.0]], "n_predict": -1, "stop": "x"}),
    ],
)
def test_other_forms_and_neutral_values_are_described(ask, path, fields):
    body = {**VALID[path], **fields}
    fits(body, DESCRIPTION["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"])
    assert ask(path, body)[0] == 200


@st.composite
def requests(draw):
    path = draw(st.sampled_from(sorted(VALID)))
    model = BODIES[path][0]
    names = st.sampled_from([field.alias or name for name, field in model.model_fields.items()])
    chosen = {name: draw(LIKELY.get(name, values) | values) for name in draw(st.lists(names, max_size=2))}
    return path, {**VALID[path], **chosen, "stream": False} if "stream" in model.model_fields else VALID[path]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=requests())
def test_any_answer_fits(ask, request):
    path, body = request
    if not path.startswith("/api/"):  # `ask` expects OpenAI's errors
        check(path, *ask(path, body))
