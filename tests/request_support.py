"""Requests to the server's application in this process, without a port."""

import asyncio
import json
from contextlib import contextmanager

from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.engine import Engine
from moepack.serving.http.server import Settings, create_app
from tiny_models import TEMPLATE

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"


@contextmanager
def engine_of(packed):
    """A started engine of a packed model with a chat template."""
    tokenizer = open_tokenizer(packed)
    tokenizer.chat_template = TEMPLATE
    engine = Engine(open_model(packed, "float32", mode="exact"), tokenizer, slots=4, context=256).start()
    yield engine
    engine.close()


@contextmanager
def asking(engine):
    """A function that sends one request to an application in this process: (status, headers, content)."""
    with asyncio.Runner() as runner:

        def ask(path, body=b"", *, method=None, app=None, headers=(("Content-Type", "application/json"),)):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            method = method or ("POST" if data else "GET")
            return runner.run(call(app or create_app(engine, Settings("tiny")), method, path, data, headers))

        yield ask


async def call(app, method, path, data, headers):
    """Send one request to an application: (status, headers, content)."""
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    path, _, query = path.partition("?")
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
             "method": method, "path": path, "raw_path": path.encode(), "query_string": query.encode(),
             "headers": raw, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}  # fmt: skip
    asked, sent = [{"type": "http.request", "body": data, "more_body": False}], []

    async def receive():
        return asked.pop() if asked else await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    error = None
    try:
        await app(scope, receive, send)
    except Exception as raised:
        error = raised
    status, answered = sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    content = b"".join(message.get("body", b"") for message in sent)
    assert (error is not None) == (status == 500), error
    if answered["content-type"] == "application/json":
        content = json.loads(content)
    if status != 200:
        checked(content)
    return status, answered, content


def checked(content):
    """The fields of an error in OpenAI's form."""
    assert set(content) - {"type"} == {"error"} and set(content["error"]) - {"details"} == {
        "message",
        "type",
        "param",
        "code",
    }
    error = content["error"]
    assert all(isinstance(error[name], str) and error[name] for name in ("message", "type", "code"))
    assert error["param"] is None or isinstance(error["param"], str)
    assert not any(
        word in error["message"] for word in ("Value error", "Input should", "str]", "list[", "Extra inputs")
    )
    return error


def completion(**fields):
    return {"model": "tiny", "prompt": "x", "max_tokens": 1, **fields}


def chat(message=None, **fields):
    return {"model": "tiny", "messages": [message or {"role": "user", "content": "x"}], "max_tokens": 1, **fields}
