"""Malformed bodies, paths and hosts, and failures of the model and the server: every answer has OpenAI's form."""

import asyncio
import json
from typing import Any

import pytest

from moepack.errors import LoadError
from tiny_models import TEMPLATE

pytest.importorskip("openai")
pytest.importorskip("fastapi")

from moepack.serving.http import openai_completions
from moepack.serving.http.body import DEEPEST
from moepack.serving.http.server import Settings, create_app
from request_support import CHATS, COMPLETIONS, chat, checked, completion

# Bodies


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "the body is empty"),
        (b" ", "the body is not JSON"),
        (b'{"model": ', "the body is not JSON"),
        (b"\xff\xff", "the body is not UTF-8: byte 0"),
        (json.dumps(completion()).encode("utf-16"), "the body is not"),
        (b"\xef\xbb\xbf{}", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        (b"null", "the body must be a JSON object"),
        (b"[" * 100_000, "levels of lists and objects"),
        (b'{"a":' * 100_000, "levels of lists and objects"),
        (b'{"model": "tiny", "metadata": ' + b'{"a":' * DEEPEST + b"1" + b"}" * (DEEPEST + 1), "more than 64 levels"),
        (b'{"temperature": NaN}', "it has the number NaN"),
        (b'{"temperature": -Infinity}', "it has the number -Infinity"),
        (b'{"temperature": 1e999}', "a number that is too large: 1e999"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "a number with too many digits"),
        (b'{"seed": 1, "seed": 2}', "seed is given twice"),
        (b'{"messages": [{"role": "user", "content": "x", "content": "y"}]}', "content is given twice"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_bodies_that_are_not_one_json_object_are_refused(ask, body, said):
    status, _, content = ask(COMPLETIONS, body, method="POST")
    assert status == 400 and said in content["error"]["message"], content
    assert content["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, completion(prompt="a\ud800b"), "prompt"),
        (COMPLETIONS, completion(model="\udfff"), "model"),
        (COMPLETIONS, completion(stop=["x", "\udc00"]), "stop[1]"),
        (COMPLETIONS, completion(user="\ud800"), "user"),
        (COMPLETIONS, completion(metadata={"a": ["\ud800"]}), "metadata.a[0]"),
        (COMPLETIONS, completion(**{"\ud800": 1}), "\\ud800"),
        (CHATS, chat({"role": "user", "content": "\ud83d"}), "messages[0].content"),
        (CHATS, chat({"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}), "messages[0].content[0].text"),
    ],
    ids=str,
)
def test_lone_surrogates_are_refused_by_name(ask, path, body, param):
    status, _, content = ask(path, body)
    assert (status, content["error"]["param"]) == (400, param)
    assert "has a lone surrogate" in content["error"]["message"]


def test_nul_characters_are_text(ask):
    assert ask(COMPLETIONS, completion(prompt="a\0b", stop="\0", user="\0"))[0] == 200
    assert ask(COMPLETIONS, completion(model="\0"))[2]["error"]["code"] == "model_not_found"


def test_a_long_name_is_quoted_in_part(ask):
    error = ask(COMPLETIONS, completion(**{"x" * 10_000: 1}))[2]["error"]
    assert len(error["message"]) <= 500 and len(error["param"]) <= 500


@pytest.mark.parametrize(
    "headers",
    [[("Origin", "https://example.org")], [("Content-Type", "text/plain")],
     [("Content-Type", "application/x-www-form-urlencoded")], [("Content-Type", "application/json; charset=latin-1")],
     [("Content-Type", "application/json"), ("Content-Encoding", "gzip")]],
    ids=str,
)  # fmt: skip
def test_bodies_of_other_kinds_are_refused(ask, headers):
    assert ask(COMPLETIONS, completion(), headers=headers)[0] == 415


def test_content_types_are_compared_without_case(ask):
    for value in ("Application/JSON", 'application/json; charset="UTF-8"', "application/json;charset=utf-8"):
        assert ask(COMPLETIONS, completion(), headers=[("Content-Type", value)])[0] == 200


# Failures


def failing(engine, template):
    """An application of the engine with a different chat template."""
    engine.tokenizer.chat_template = template
    return create_app(engine, Settings("tiny"))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ 1 + messages[0]['content'] }}", "TypeError"),
        ("{{ messages[0].nothing.more }}", "has no attribute"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | sum }}", "TypeError"),
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{% for %}", "rejects the messages"),
        ("{{ ''.__class__.__mro__ }}", "rejects the messages"),
        ("{{ '' }}", "the prompt has no tokens"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(ask, engine, template, said):
    try:
        status, _, content = ask(CHATS, chat(), app=failing(engine, template))
    finally:
        engine.tokenizer.chat_template = TEMPLATE
    assert (status, content["error"]["param"]) == (400, "messages")
    assert said in content["error"]["message"]


class Panic(BaseException):
    """The exception of PyO3 for a Rust panic."""


@pytest.mark.parametrize("error", [Exception("x"), TypeError("x"), KeyError("x"), Panic("x")], ids=repr)
def test_a_tokenizer_that_fails_refuses_the_prompt(ask, engine, monkeypatch, error):
    def fail(*args: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(type(engine.tokenizer), "__call__", fail)
    for path, body, param in ((COMPLETIONS, completion(), "prompt"), (CHATS, chat(), "messages")):
        status, _, content = ask(path, body)
        assert (status, content["error"]["param"]) == (400, param)
        assert type(error).__name__ in content["error"]["message"]


def test_a_defect_is_a_500_in_form_and_is_raised_for_the_log(ask, engine, monkeypatch):
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(engine, "submit", fail)
    status, _, content = ask(COMPLETIONS, completion())
    assert (status, content["error"]["type"], content["error"]["code"]) == (500, "server_error", "internal_error")
    assert "of ours" not in content["error"]["message"]


def test_a_defect_in_a_stream_is_its_last_event(ask, monkeypatch):
    def fail(*args: Any) -> None:
        raise ZeroDivisionError("of ours")

    monkeypatch.setattr(openai_completions, "usage", fail)
    status, _, content = ask(COMPLETIONS, completion(stream=True, stream_options={"include_usage": True}))
    events = content.decode().split("\n\n")
    assert status == 200 and events[-1] == ""
    assert checked(json.loads(events[-2].removeprefix("data: ")))["code"] == "internal_error"


def test_out_of_range_settings_of_the_model_are_reported_at_the_start(engine, monkeypatch):
    monkeypatch.setattr(engine.model.generation_config, "do_sample", True)
    monkeypatch.setattr(engine.model.generation_config, "top_k", -1)
    with pytest.raises(LoadError, match=r"generation_config\.json: top_k must be at least 0"):
        create_app(engine, Settings("tiny"))


def test_an_unusable_model_name_is_rejected_at_startup():
    with pytest.raises(ValueError, match="not Unicode text"):
        Settings("a\udcff")


# Paths, methods, hosts, keys


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/v1/nothing", 404, "there is no /v1/nothing"),
        ("POST", "/v1/nothing", 404, "there is no /v1/nothing"),
        ("GET", "/page", 404, "there is no /page"),
        ("POST", "/", 405, "/ does not take POST"),
        ("GET", "/?q=1", 400, "q is not supported"),
        ("GET", "/\0", 404, "there is no /"),
        ("POST", "/v1/completions/", 404, "there is no /v1/completions/"),
        ("GET", "/v1/completions", 405, "/v1/completions does not take GET"),
        ("POST", "/v1/models", 405, "/v1/models does not take POST"),
        ("DELETE", "/health", 405, "/health does not take DELETE"),
        ("GET", "/v1/models/", 404, "there is no model ''"),
        ("GET", "/v1/models/other", 404, "there is no model 'other'"),
        ("GET", "/v1/models?limit=1", 400, "limit is not supported"),
        ("POST", "/v1/completions?stream=true", 400, "stream is not supported"),
    ],
)
def test_other_paths_methods_and_queries(ask, method, path, status, said):
    got, headers, content = ask(path, completion() if method == "POST" else b"", method=method)
    assert got == status and said in content["error"]["message"], content
    assert ("allow" in headers) == (status == 405)


def test_a_get_with_a_body_is_refused(ask):
    assert ask("/v1/models", {"limit": 1}, method="GET")[0] == 400


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("LOCALHOST:80", 200), ("localhost.", 200), ("127.0.0.1:8000", 200), ("[::1]:80", 400),
     ("other.example", 400), ("localhost.other.example", 400), ("localhost@other", 400), ("localhost:80:80", 400),
     ("[", 400), ("", 400), (None, 400)],
)  # fmt: skip
def test_a_wrong_host_is_refused_in_form(ask, engine, host, status):
    app = create_app(engine, Settings("tiny", api_key="k", hosts=("127.0.0.1", "localhost")))
    got, _, content = ask("/health", app=app, headers=() if host is None else [("Host", host)])
    assert got == status and (got == 200 or content["error"]["code"] == "wrong_host")


def test_health_and_the_page_alone_are_answered_without_the_key(ask, engine):
    app = create_app(engine, Settings("tiny", api_key="é"))
    key = [("Authorization", "Bearer é".encode().decode("latin-1"))]
    assert ask("/health", app=app)[::2] == (200, {"status": "ok"})
    assert set(ask("/health", app=app, headers=key)[2]) == {"status", "active", "waiting", "kept"}
    for path in (
        "/v1/models",
        "/v1/models/tiny",
        "/v1/nothing",
        "/health/",
        "//health",
        "/page",
        "/page/none.js",
        "/props",
    ):
        status, headers, content = ask(path, app=app)
        assert (status, content["error"]["code"]) == (401, "invalid_api_key")
        assert headers["www-authenticate"] == "Bearer"
    assert ask("/v1/models", app=app, headers=key)[0] == 200


def test_a_client_that_goes_before_its_body_ends_gets_nothing(engine):
    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b""}
    asyncio.run(create_app(engine, Settings("tiny"))(scope, receive, send))
