"""OpenAI's interface over HTTP: the `openai` client, plain HTTP like curl's, bad requests and broken clients."""

import http.client
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from typer.testing import CliRunner

from command_support import interruptible
from moepack.cli import app, main
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampling

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

from moepack.serving.engine import Engine  # noqa: E402
from moepack.serving.http import openai_completions  # noqa: E402
from moepack.serving.http.server import Settings, create_app  # noqa: E402
from moepack.serving.sequence import Sequence  # noqa: E402
from serving_support import happens, is_idle, running, templated  # noqa: E402

KEY = "a secret"
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def source(packed, tmp_path_factory):
    """The packed model with a chat template."""
    return templated(packed, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def engine(source):
    return Engine(open_model(source, "float32", mode="exact"), open_tokenizer(source), slots=8, queue=64, context=512)


@pytest.fixture(scope="module")
def port(engine, source):
    with running(create_app(engine, Settings("tiny", source, KEY, answer=8, body=20_000))) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)


def send(port, method, path, body=None, headers=JSON):
    """Send one request; return (status, content)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body if body is None or isinstance(body, bytes) else json.dumps(body), headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content)


def refused(port, data):
    """The error returned for a request of raw bytes."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 400
        return json.load(response)["error"]


def written(engine, prompt, tokens):
    return generate(engine.model, engine.tokenizer, prompt, Sampling(max_new_tokens=tokens)).text


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "moepack"
    with pytest.raises(openai.NotFoundError, match="there is no model 'other', only 'tiny'"):
        client.models.retrieve("other")


def test_completions_whole_and_streamed_equal_generate(client, engine):
    asked = {"model": "tiny", "prompt": "The sea", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**asked)
    assert whole.choices[0].text == written(engine, "The sea", 12)
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (7, 12, 19)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 12
    tokens = {**asked, "prompt": engine.tokenizer("The sea").input_ids}
    assert client.completions.create(**tokens).choices[0].text == whole.choices[0].text


def test_chats_whole_and_streamed(client, engine):
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "sea"}]
    messages = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": parts}]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == written(engine, "s:be kind\nu:The sea\na:", 12)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_an_event_is_one_line_for_every_client(port, engine, monkeypatch):
    text = "a\u2028b\u2029c\x85d\ne\rf\x0bg\x0ch\x1ci"
    monkeypatch.setattr(Sequence, "take", lambda self, part, logits: self.finish("stop", text))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "tiny", "prompt": "x", "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    content = connection.getresponse().read().decode()
    connection.close()
    assert "data: [DONE]" in content
    events = [part.removeprefix("data: ") for part in content.splitlines() if part and "[DONE]" not in part]
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text


def test_stop_strings_seeds_and_the_usual_length(client, engine):
    free = written(engine, "The sea", 8)
    asked = {"model": "tiny", "prompt": "The sea"}
    assert client.completions.create(**asked, temperature=0).choices[0].text == free
    stopped = client.completions.create(**asked, temperature=0, stop=free[2:4]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (free[: free.index(free[2:4])], "stop")
    drawn = {client.completions.create(**asked, temperature=1.5, seed=5).choices[0].text for _ in range(3)}
    assert len(drawn) == 1


def test_many_clients_at_a_time_get_their_own_answers(client, engine):
    prompts = [f"{'a b c d'[: 1 + i % 7]} {i % 5}" for i in range(24)]
    expected = {prompt: written(engine, prompt, 6) for prompt in set(prompts)}

    def ask(prompt):
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "stream": True}
        return "".join(chunk.choices[0].text for chunk in client.completions.create(**asked))

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, prompts)) == [expected[prompt] for prompt in prompts]
    assert is_idle(engine)


COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 2}


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        (b" " * 20_001, 413, "too_large", "larger than 20000 bytes"),
        ({**COMPLETION, "model": "gpt-4"}, 404, "model_not_found", "there is no model 'gpt-4', only 'tiny'"),
        ({**COMPLETION, "prompt": ""}, 400, "invalid_prompt", "the prompt has no tokens"),
        ({**COMPLETION, "prompt": [999_999]}, 400, "invalid_prompt", "ids must be between 0 and 284"),
        ({**COMPLETION, "prompt": "x" * 512}, 400, "context_length_exceeded", "the request needs 512 prompt tokens"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_bad_requests_get_the_reason(port, body, status, code, said):
    got, content = send(port, "POST", "/v1/completions", body)
    assert (got, content["error"]["code"]) == (status, code), content
    assert said in content["error"]["message"]


def test_a_refused_request_may_have_a_long_body(port):
    for headers, status in ((JSON, 413), ({**JSON, "Authorization": "Bearer x"}, 401)):
        assert send(port, "POST", "/v1/completions", b" " * 30_000_000, headers)[0] == status


def test_the_key_is_checked(port):
    wrong = {"error": {"message": "the API key is missing or wrong", "type": "authentication_error", "param": None,
                       "code": "invalid_api_key"}}  # fmt: skip
    for key in ("", "Bearer ", "Bearer a secre", "Bearer é"):
        assert send(port, "GET", "/v1/models", headers={"Authorization": key.encode()}) == (401, wrong)


def test_a_defect_is_reported_to_the_client_and_its_traceback_to_the_log(client, engine, monkeypatch, caplog):
    def fail(*args):
        raise ZeroDivisionError("of ours")

    log = logging.getLogger("uvicorn.error")
    log.addHandler(caplog.handler)
    try:
        with monkeypatch.context() as patched, pytest.raises(openai.InternalServerError, match="internal server error"):
            patched.setattr(engine, "submit", fail)
            client.completions.create(**COMPLETION)
        assert happens(lambda: "ZeroDivisionError: of ours" in caplog.text)  # it is logged after the answer
        monkeypatch.setattr(openai_completions, "usage", fail)
        again = client.with_options(max_retries=2)  # the server closes a connection after a defect
        with pytest.raises(openai.APIError, match="internal server error"):
            list(again.completions.create(**COMPLETION, stream=True, stream_options={"include_usage": True}))
        assert "ZeroDivisionError: of ours" in caplog.text.partition("a stream failed")[2]
    finally:
        log.removeHandler(caplog.handler)
    assert is_idle(engine)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slot(port, engine, stream, monkeypatch):
    """The engine waits after a few tokens until the answer is cancelled, so the answer cannot end by itself."""
    steps, step = [], engine._step

    def held():
        steps.append(None)
        if len(steps) > 20:
            happens(lambda: all(sequence.cancelled for sequence in engine._active))
        step()

    monkeypatch.setattr(engine, "_step", held)
    monkeypatch.setattr(engine, "ends", frozenset())
    body = json.dumps({**COMPLETION, "max_tokens": 500, "stream": stream}).encode()
    head = "".join(f"{name}: {value}\r\n" for name, value in JSON.items())
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        )
        while not engine.counts()["active"]:
            time.sleep(0.005)
        if stream:
            connection.recv(100)
    assert is_idle(engine)
    assert len(steps) < 100


def test_half_a_request_affects_no_other(port, client):
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{"model"')
        assert client.completions.create(**COMPLETION).choices[0].text


def test_a_full_queue_says_so(source):
    model, tokenizer = open_model(source), open_tokenizer(source)
    engine = Engine(model, tokenizer, slots=1, queue=1, context=2000)
    with running(create_app(engine, Settings("tiny"))) as port:
        plain = {"Content-Type": "application/json"}
        ask = lambda: send(port, "POST", "/v1/completions", {**COMPLETION, "max_tokens": 100}, plain)  # noqa: E731
        with ThreadPoolExecutor(8) as pool:
            answers = [future.result() for future in [pool.submit(ask) for _ in range(8)]]
    statuses = sorted(status for status, _ in answers)
    assert statuses[0] == 200 and statuses[-1] == 429 and set(statuses) == {200, 429}
    assert next(content for status, content in answers if status == 429)["error"]["code"] == "queue_full"


def test_a_directory_that_is_swapped_is_noticed(source, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(source, directory)
    engine = Engine(open_model(directory), open_tokenizer(directory))
    plain = {"Content-Type": "application/json"}
    with running(create_app(engine, Settings("tiny", directory))) as port:
        assert send(port, "POST", "/v1/completions", COMPLETION, plain)[0] == 200
        directory.rename(tmp_path / "old")
        for _ in range(2):
            status, content = send(port, "POST", "/v1/completions", COMPLETION, plain)
            assert (status, content["error"]["code"]) == (503, "model_changed")
            if not directory.exists():
                shutil.copytree(source, directory)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--max-body", "much", "'much' is not a size"),
        ("--slots", "0", "--slots"),
        ("--mode", "fast", "'fast'"),
        ("--chat-template-kwargs", "[]", "--chat-template-kwargs must be a JSON object"),
        ("--chat-template-kwargs", '{"thin": 1}', "the chat template does not use the variable 'thin'"),
        ("--chat-template", "nothing.jinja", "nothing.jinja"),
        ("--temperature", "-1", "temperature must be a finite number of at least 0"),
        ("--top-p", "2", "top_p must be above 0 and at most 1"),
    ],
)
def test_wrong_usage(source, monkeypatch, option, value, said):
    monkeypatch.setattr("moepack.cli.evaluate.quiet_transformers", lambda: None)
    result = CliRunner().invoke(app, ["serve", str(source), option, value])
    assert result.exit_code == 2 and said in result.stderr, result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_named(source, capsys):
    with pytest.raises(SystemExit, match="1"):
        main(["serve", str(source), "--device", "cuda"])
    assert "packed weights run only on the CPU here" in capsys.readouterr().err


def test_missing_packages_are_named(source, monkeypatch):
    monkeypatch.setattr("moepack.cli.serve.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", str(source)])
    assert str(result.exception) == "serving needs FastAPI and uvicorn: pip install 'moepack[serve]'"


def test_the_command_answers_curl_and_ends_cleanly(source):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moepack", "serve", str(source), "--port", str(port), "--name", "tiny"]
    environment = {**os.environ, "MOEPACK_API_KEY": KEY}
    with interruptible():
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    with process:
        for line in process.stderr:
            if "running on" in line:
                assert f"http://127.0.0.1:{port}" in line
                break
        url = f"http://127.0.0.1:{port}/v1/completions"
        headers = [part for name, value in JSON.items() for part in ("-H", f"{name}: {value}")]
        asked = ["curl", "-sN", url, *headers, "-d", json.dumps({**COMPLETION, "stream": True})]
        if shutil.which("curl"):
            events = subprocess.run(asked, capture_output=True, text=True, timeout=60).stdout.split("\n\n")
            assert events[-2:] == ["data: [DONE]", ""]
            assert json.loads(events[0].removeprefix("data: "))["object"] == "text_completion"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/models", headers={**JSON, "Host": "other.example"})
        response = connection.getresponse()
        assert (response.status, json.load(response)["error"]["code"]) == (400, "wrong_host")
        connection.close()
        for head in (
            b"GET /health HTTP/1.1\r\n",
            b"nonsense\r\n",
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000,
        ):
            assert refused(port, head + b"\r\n")["code"] == "invalid_http"
        assert send(port, "GET", "/health")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
        assert "Traceback" not in process.stderr.read()
