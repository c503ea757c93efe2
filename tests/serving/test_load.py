"""Many and broken clients at a time: answers do not mix, broken clients delay no others, and no resources leak."""

import gc
import http.client
import json
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from transformers.cache_utils import DynamicCache

from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampling

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

import uvicorn

from moepack.serving.engine import Engine
from moepack.serving.http import bounds, listening
from moepack.serving.http.server import Settings, create_app
from moepack.serving.sequence import Sequence
from serving_support import happens, is_idle

PLAIN = {"Content-Type": "application/json"}
LENGTHS = [1, 2, 3, 5, 8, 13, 30, 77, 150, 400, 560]
"""Lengths of prompts in tokens; the longest is read in two parts."""


@pytest.fixture(scope="module")
def engine(packed):
    model = open_model(packed, "float32", mode="exact")
    return Engine(model, open_tokenizer(packed), slots=4, queue=500, context=600)


@contextmanager
def served(engine, body=20_000):
    """A server with the protocol of the command; its port."""
    app = create_app(engine, Settings("tiny", body=body))
    config = uvicorn.Config(app, port=0, log_level="critical", http=listening._Protocol, timeout_graceful_shutdown=1)
    server = listening._Server(config, engine, 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert happens(lambda: server.started)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join()


def body(prompt, tokens, stream):
    asked = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}
    return json.dumps(asked).encode()


def ask(port, prompt, tokens, stream):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/v1/completions", body(prompt, tokens, stream), PLAIN)
    response = connection.getresponse()
    content = response.read().decode()
    connection.close()
    assert response.status == 200, content
    if not stream:
        return json.loads(content)["choices"][0]["text"]
    lines = [line[6:] for line in content.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def raw(prompt, tokens):
    data = body(prompt, tokens, True)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def disturb(port, number):
    """A client that breaks something; the connection, if it stays open."""
    data = raw(f"never {number}", 30)
    connection = socket.create_connection(("127.0.0.1", port))
    kind = number % 5
    if kind == 0:  # leaves at once
        connection.sendall(data)
        connection.close()
    elif kind == 1:  # leaves in the middle of the answer
        connection.sendall(data)
        connection.recv(20)
        connection.close()
    elif kind == 2:  # never reads
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(data)
    elif kind == 3:  # sends half of a request
        connection.sendall(data[: len(data) - 10 - number])
    else:
        connection.sendall(bytes(range(number % 256, 256)) * 10 + b"\r\n\r\n")
    return connection


def test_everyone_gets_the_answer_that_they_get_alone(engine):
    prompts = [("".join(chr(97 + (i * (n + 3)) % 26) for i in range(n)), 1 + n % 9) for n in LENGTHS]
    expected = {
        prompt: generate(engine.model, engine.tokenizer, prompt, Sampling(max_new_tokens=tokens)).text
        for prompt, tokens in prompts
    }
    files = len(os.listdir("/proc/self/fd"))
    with served(engine) as port, ExitStack() as stack, ThreadPoolExecutor(32) as pool:
        for _ in range(100):  # idle
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        disturbed = [pool.submit(disturb, port, number) for number in range(40)]
        asked = [(*prompts[(7 * i) % len(prompts)], i % 2 == 0) for i in range(88)]
        found = list(pool.map(lambda one: ask(port, *one), asked))
        assert found == [expected[prompt] for prompt, _, _ in asked]
        for future in disturbed:
            stack.enter_context(future.result())
        stack.close()
        assert is_idle(engine)
    assert happens(lambda: len(os.listdir("/proc/self/fd")) <= files)


@pytest.fixture
def uncollected():
    """Counts the new objects of a class that exist without the garbage collector."""
    gc.collect()
    gc.disable()
    known = {id(each): each for each in gc.get_objects() if type(each) in (DynamicCache, Sequence)}
    yield lambda kind: sum(type(each) is kind and id(each) not in known for each in gc.get_objects())
    gc.enable()


def test_ended_answers_leave_nothing_to_the_garbage_collector(engine, uncollected):
    """A collection may be minutes away; keys and values of hundreds of answers would wait for it."""
    own = fresh(engine)
    with served(own) as port:
        for number in range(20):
            ask(port, f"{number} and", 3, number % 2 == 0)
        assert is_idle(own)
        assert happens(lambda: uncollected(Sequence) == 0)
        assert uncollected(DynamicCache) == own.counts()["kept"] > 0


def test_answers_that_nobody_waits_for_keep_no_keys_and_values(engine, uncollected):
    own = fresh(engine)
    with served(own) as port:
        for number in range(20):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(raw(f"{number} and", 500))
                assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        assert is_idle(own)
        assert happens(lambda: uncollected(DynamicCache) == own.counts()["kept"])


def fresh(engine):
    """Another engine of the same model."""
    return Engine(engine.model, engine.tokenizer, slots=4, context=600)


def closes(connection):
    """Whether the server closes a connection within a minute; what it sent."""
    connection.settimeout(60)
    found = b""
    while new := connection.recv(1000):
        found += new
    return found


def test_connections_that_send_no_request_are_closed(engine, monkeypatch):
    monkeypatch.setattr(listening, "HEADER_SECONDS", 1.0)  # complete headers arrive sooner on a busy machine, too
    with served(fresh(engine)) as port:
        for sent in (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\nX: "):
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(sent)
                assert closes(connection) == b""
        with socket.create_connection(("127.0.0.1", port)) as connection:  # the second request never ends
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            connection.sendall(b"GET /hea")
            closes(connection)
        assert ask(port, "x", 200, True)  # which takes longer than that


def test_bodies_that_do_not_arrive_end(engine, monkeypatch):
    monkeypatch.setattr(bounds, "BODY_SECONDS", 0.3)
    with served(fresh(engine)) as port, socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(raw("x", 3)[:-5])
        assert closes(connection).startswith(b"HTTP/1.1 408")


def test_bodies_that_have_not_arrived_take_bounded_memory(engine, monkeypatch):
    monkeypatch.setattr(bounds, "BODIES", 2)
    data = raw("x" * 9_500, 1)  # the prompt exceeds the context, so that it is answered at once
    with served(fresh(engine), body=10_000) as port, ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(2)]
        for connection in held:
            connection.sendall(data[:-5])
        assert happens(lambda: _status(port, data) == b"HTTP/1.1 503")
        held[0].close()
        assert happens(lambda: _status(port, data) == b"HTTP/1.1 400")


def _status(port, data):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        return connection.recv(12)
