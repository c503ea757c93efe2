"""`moepack serve` under load, beside llama.cpp's server where it is installed: first token, tokens a second, memory.

    python benches/serve.py MODEL [--clients 1 8 64] [--tokens 32] [--minutes 0] [--gguf FILE] [--threads 2]

Each client asks for streamed answers one after another, of prompts that begin differently, and counts the pieces that
come. Greedy, and no answer ends early where the model does not end it itself. With `--minutes` the last number of
clients goes on for so long, and the server's own memory is told over time: what it grows by after the first quarter is
a leak. `--gguf` takes the same weights as `moepack export --to gguf` writes them, for `python -m llama_cpp.server`
(`llama-cpp-python[server]`), which answers one request at a time. Both servers run one after the other, alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import machine

HEADERS = {"Content-Type": "application/json"}
TEXT = "{number} clients asked. She opened the door and saw that the sea was not where it had been, and then"


@contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    """A server's process id, once it answers."""
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                try:
                    ask(port, "GET", "/v1/models")
                    break
                except OSError:
                    assert process.poll() is None, f"{command} has ended"
                    time.sleep(0.2)
            yield process.pid
        finally:
            process.terminate()


def ask(port: int, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
    """Send a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request(method, path, None if body is None else json.dumps(body), HEADERS)
    return connection.getresponse()


def stream(port: int, name: str, tokens: int, number: int) -> tuple[float, int]:
    """One answer: seconds to its first piece, and its tokens."""
    body = {"model": name, "prompt": TEXT.format(number=number), "max_tokens": tokens, "temperature": 0, "stream": True}
    start, first = time.perf_counter(), 0.0
    response, pieces = ask(port, "POST", "/v1/completions", body), 0
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            pieces += 1
    return first, pieces


def load(port: int, name: str, clients: int, tokens: int, seconds: float) -> dict[str, float]:
    """Clients that ask again and again for some time."""
    until, start = time.perf_counter() + seconds, time.perf_counter()

    def client(number: int) -> list[tuple[float, int]]:
        answers = [stream(port, name, tokens, number)]
        while time.perf_counter() < until:
            answers.append(stream(port, name, tokens, number + clients * len(answers)))
        return answers

    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for found in pool.map(client, range(clients)) for answer in found]
    firsts = sorted(first for first, _ in answers)
    return {
        "answers": len(answers),
        "tokens_per_second": sum(count for _, count in answers) / (time.perf_counter() - start),
        "first_token_median": statistics.median(firsts),
        "first_token_worst_of_20": firsts[int(0.95 * (len(firsts) - 1))],
    }


def own_memory(process: int) -> int:
    """Bytes of a process that are no mapped files."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found
    return 1024 * int(found[1])


def measure(name: str, command: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    figures: dict[str, Any] = {}
    with running(command, port) as process:
        model = json.load(ask(port, "GET", "/v1/models"))["data"][0]["id"]
        stream(port, model, 4, 0)
        for clients in options.clients:
            figures[str(clients)] = found = load(port, model, clients, options.tokens, options.seconds)
            print(f"{name}, {clients} clients: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
        memory, until = [own_memory(process)], time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            load(port, model, options.clients[-1], options.tokens, 5.0)
            memory.append(own_memory(process))
        figures["own_memory"] = memory
        print(f"{name}, own memory in MB: " + " ".join(f"{count / 1e6:.0f}" for count in memory), flush=True)
    return figures


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="How long each number of clients asks.")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/serve.json"))
    options = parser.parse_args()
    most = max(options.clients)
    threads = ["--threads", str(options.threads)]
    command = [sys.executable, "-m", "moepack", "serve", str(options.model), "--slots", str(most), *threads]
    figures = {"moepack": measure("moepack", command, options)}
    if options.gguf is not None and find_spec("llama_cpp") is not None:
        command = [sys.executable, "-m", "llama_cpp.server", "--model", str(options.gguf)]
        figures["llama.cpp"] = measure("llama.cpp", [*command, "--n_threads", str(options.threads)], options)
    machine.save(options.out, options.threads, figures)


if __name__ == "__main__":
    main()
