"""`moepack serve` as a service: readiness, shutdown, Unix sockets, the systemd unit, the image, the log."""

import http.client
import json
import logging
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from moepack.cli import app
from moepack.errors import LoadError
from moepack.integrations.loading import open_model, open_tokenizer
from places import ROOT

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")

import uvicorn

from moepack.serving.engine import Engine
from moepack.serving.http.address import require_free
from moepack.serving.http.listening import _Server
from moepack.serving.http.server import Settings, create_app
from moepack.serving.http.unit import unit
from moepack.serving.http.unixsocket import unix_socket
from serving_support import happens, running

PLAIN = {"Content-Type": "application/json"}
MARK = "xylophone"
"""A word of prompts that no log may hold."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=60)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(self.path))


def post(connection, body, path="/v1/completions"):
    connection.request("POST", path, json.dumps({"model": "tiny", **body}), PLAIN)
    response = connection.getresponse()
    return response.status, response.read().decode()


@contextmanager
def listening(source, drain, step=0.0):
    """A server of an engine that takes `step` seconds a step; the server, its port and the engine."""
    engine = Engine(open_model(source, "float32"), open_tokenizer(source), slots=1, context=600)
    forward = engine._step
    engine._step, engine.ends = lambda: (time.sleep(step), forward()), frozenset()
    server = _Server(uvicorn.Config(create_app(engine, Settings("tiny")), port=0, log_level="error"), engine, drain)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert happens(lambda: server.started)
    try:
        yield server, server.servers[0].sockets[0].getsockname()[1], engine
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join(60)
        assert not thread.is_alive()


def begin(port, engine, tokens):
    """Start a streamed answer; its response, once it is running."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = {"model": "tiny", "prompt": "x", "max_tokens": tokens, "temperature": 0, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), PLAIN)
    response = connection.getresponse()
    assert happens(lambda: engine.counts()["active"])
    return response


def test_a_running_answer_ends_before_the_server(packed):
    with listening(packed, drain=60, step=0.02) as (server, port, engine):
        response = begin(port, engine, 50)
        server.handle_exit(signal.SIGTERM, None)
        assert happens(lambda: not engine.is_open)
        late = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        status, content = post(late, {"prompt": "x"})
        assert (status, json.loads(content)["error"]["code"]) == (503, "closed")
        late.request("GET", "/health")
        assert late.getresponse().status == 503
        content = response.read().decode()
        assert content.endswith("data: [DONE]\n\n") and '"finish_reason": "length"' in content


@pytest.mark.parametrize(("drain", "signals"), [(0.3, 1), (600, 2)])
def test_the_wait_for_answers_is_bounded(packed, drain, signals):
    """By the option, and by a second signal: the answer is cut before its last token."""
    with listening(packed, drain, step=0.05) as (server, port, engine):
        response = begin(port, engine, 500)
        for _ in range(signals):
            server.handle_exit(signal.SIGTERM, None)
        content = response.read().decode()
        assert "the server is shutting down" in content and "[DONE]" not in content


def test_the_command_says_when_it_is_ready_and_when_it_stops(packed, tmp_path):
    """Over a Unix socket in place of one that an earlier server left."""
    path, notices = tmp_path / "socket", socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    notices.bind(str(tmp_path / "notify"))
    notices.settimeout(120)
    command = [sys.executable, "-m", "moepack", "serve", str(packed), "--host", f"unix:{path}", "--name", "tiny"]
    environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert b"READY=1" in notices.recv(1000)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        connection = UnixConnection(path)
        assert post(connection, {"prompt": f"The {MARK}", "max_tokens": 2})[0] == 200
        assert post(connection, {"prompt": MARK * 1000, "max_tokens": 2})[0] == 400
        assert post(connection, {"prompt": MARK, MARK: 1})[0] == 400
        assert post(connection, {"prompt": MARK, "messages": [{"role": "user", "content": MARK}]}, "/v1/x")[0] == 404
        second = subprocess.run(command, capture_output=True, text=True)
        assert second.returncode == 1 and "another server listens there" in second.stderr
        process.send_signal(signal.SIGTERM)
        assert b"STOPPING=1" in notices.recv(1000)
        assert process.wait(60) == 0
        log = process.stderr.read()
    assert "Traceback" not in log and MARK not in log
    assert not path.exists()


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_logged_on_request(packed, caplog, monkeypatch, asked):
    log = logging.getLogger("a log")
    monkeypatch.setattr("moepack.serving.http.bounds._LOG", log)
    engine = Engine(open_model(packed, "float32"), open_tokenizer(packed))
    with running(create_app(engine, Settings("tiny", log_prompts=asked))) as port, caplog.at_level(logging.DEBUG):
        assert post(http.client.HTTPConnection("127.0.0.1", port), {"prompt": MARK, "max_tokens": 1})[0] == 200
    assert (MARK in caplog.text) == asked


def test_other_files_are_never_replaced_by_a_socket(tmp_path):
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(LoadError, match="exists and is not a socket"), unix_socket(path):
        pass
    assert path.read_text() == "kept"
    with pytest.raises(LoadError, match="cannot listen there"), unix_socket(tmp_path / "none" / "socket"):
        pass
    with pytest.raises(LoadError, match="cannot listen there"), unix_socket(tmp_path / ("x" * 200)):
        pass
    with unix_socket(tmp_path / "socket") as listener:
        listener.listen()
        with pytest.raises(LoadError, match="another server"), unix_socket(tmp_path / "socket"):
            pass
        (tmp_path / "socket").unlink()
        (tmp_path / "socket").write_text("somebody else's")
    assert (tmp_path / "socket").exists()


def test_a_unix_host_without_a_path_is_wrong_usage(packed, monkeypatch):
    monkeypatch.setattr("moepack.cli.evaluate.quiet_transformers", lambda: None)
    result = CliRunner().invoke(app, ["serve", str(packed), "--host", "unix:"])
    assert result.exit_code == 2 and "needs a path" in result.stderr


def test_an_address_that_cannot_be_used_is_named_before_the_model_is_loaded(packed, monkeypatch):
    monkeypatch.setattr("moepack.cli.evaluate.quiet_transformers", lambda: None)
    monkeypatch.setattr("moepack.integrations.loading.open_with", lambda *_: pytest.fail("loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for host in ("127.0.0.1", "localhost"):
            done = CliRunner().invoke(app, ["serve", str(packed), "--host", host, "--port", str(port)])
            assert f"{host}:{port}: cannot listen there: Address already in use" in str(done.exception), done
    done = CliRunner().invoke(app, ["serve", str(packed), "--host", "no-such-host.invalid"])
    assert "no-such-host.invalid:8000: cannot listen there: " in str(done.exception), done
    require_free("127.0.0.1", port)
    require_free("::" if socket.has_ipv6 else "127.0.0.1", 0)


def test_the_unit_runs_what_was_asked_for_and_holds_no_key(packed, monkeypatch):
    monkeypatch.chdir(packed.parent)
    adapters = ["--lora", "x=y", "--lora", "z=/w"]
    arguments = [
        "--name",
        'a "b" %c $D',
        "--api-key",
        "a secret",
        "--slots",
        "3",
        "--resident",
        "--drain",
        "30",
        *adapters,
    ]
    result = CliRunner().invoke(app, ["serve", packed.name, *arguments, "--print-unit"])
    assert result.exit_code == 0 and "secret" not in result.stdout
    lines = dict(line.split("=", 1) for line in result.stdout.splitlines() if re.match(r"\w+=", line))
    start = f"{sys.executable} -m moepack serve {packed.absolute()} "
    lora = f"--lora=x={packed.parent.absolute() / 'y'} --lora=z=/w"
    assert lines["ExecStart"] == start + r'"--name=a \"b\" %%c $$D" --slots=3 ' + f"{lora} --drain=30.0 --resident"
    assert (lines["Type"], lines["TimeoutStopSec"], lines["PrivateDevices"]) == ("notify", "45", "yes")
    assert "PrivateDevices=yes" not in unit(["/x"], "x", 5, has_gpu=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_takes_the_unit(tmp_path):
    file = tmp_path / "moepack.service"
    for has_gpu in (False, True):
        file.write_text(unit([sys.executable, "-m", "moepack", "serve", "/a b/%n;$X"], "a %n", 5, has_gpu))
        result = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60)
        assert (result.returncode, result.stderr) == (0, "")


def test_the_image_runs_options_that_exist():
    command = json.loads(re.search(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1])
    result = CliRunner().invoke(app, [*command[1:], "--print-unit"])
    assert result.exit_code == 0, result.output
    assert "--host=0.0.0.0 --port=8000" in result.stdout
