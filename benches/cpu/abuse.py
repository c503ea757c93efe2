"""Runs `moepack serve` under load and abuse, and checks that every answer is the one that its prompt gets alone.

    python -m benches.cpu.abuse [MODEL] [--minutes 3] [--phases 5] [--clients 64] [--idle 1000] [--slots 16]
        [--out build/abuse.json]

`--clients` ask again and again, streamed or not, with prompts of all lengths up to the context. Their greedy answers
were recorded before, one at a time. Meanwhile other clients disconnect in the middle of answers, read slowly, send half
of a body or of a header, or nonsense; `--idle` connections send nothing. Reports first tokens, wrong answers, and the
server's memory, files and threads over time. The exit code is 1 if an answer is wrong, a client starves, or memory or
files grow.

A run has phases of equal load. After each, all clients leave, and the longest prompts fill the kept caches, so that the
server holds the same each time. The first phase fills all other caches; the growth after it is divided by the number of
requests, because a leak grows with them, and what an allocator keeps varies by a few MB.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.tools import machine

HEADERS = {"Content-Type": "application/json"}
ROOT = Path(__file__).parents[2]
TEXT = ROOT / "examples" / "texts" / "white-fang.txt"
CONTEXT, LONGEST = 512, 32
"""Tokens of prompt and answer, and of an answer."""
SECONDS = 120
"""The longest time to a first token that does not count as starving."""
GROWTH = 1024
"""Bytes by which memory may grow per request, less than a request owns: an answer without keys and values has 2.3 kB of
Python objects, a connection 7 kB."""


@dataclass
class Asked:
    """A prompt with the answer that it gets alone."""

    prompt: list[int]
    tokens: int
    text: str = ""


@dataclass
class Seen:
    """What all clients have seen."""

    firsts: list[float] = field(default_factory=list)
    connects: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def answer(port: int, asked: Asked, stream: bool, connects: list[float]) -> tuple[str, float]:
    """An answer, and the seconds from the request to its first token. Connecting, the system's work, is noted apart."""
    connection, start = http.client.HTTPConnection("127.0.0.1", port, timeout=600), time.perf_counter()
    connection.connect()
    connects.append(time.perf_counter() - start)
    body = {"model": "abused", "prompt": asked.prompt, "max_tokens": asked.tokens, "temperature": 0, "stream": stream}
    first, start, texts = 0.0, time.perf_counter(), []
    connection.request("POST", "/v1/completions", json.dumps(body), HEADERS)
    response = connection.getresponse()
    if response.status == 429:
        raise OverflowError
    assert response.status == 200, response.read()
    if not stream:
        content = json.load(response)
        return content["choices"][0]["text"], time.perf_counter() - start
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            event = json.loads(line[6:])
            assert "error" not in event, event
            texts.append(event["choices"][0]["text"])
    return "".join(texts), first


def raw(port: int, asked: Asked) -> bytes:
    """A request in bytes, which can be sent in part."""
    body = {"model": "abused", "prompt": asked.prompt, "max_tokens": asked.tokens, "temperature": 0, "stream": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost:{port}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(data) + data


def polite(port: int, asked: Asked, seen: Seen, chance: random.Random) -> None:
    """Ask, and compare the answer."""
    try:
        text, first = answer(port, asked, chance.random() < 0.7, seen.connects)
    except OverflowError:
        seen.counts["refused with 429"] += 1
        time.sleep(0.5)
        return
    seen.firsts.append(first)
    seen.counts["answers"] += 1
    if text != asked.text:
        seen.wrong.append(f"{len(asked.prompt)} tokens: {text!r}, not {asked.text!r}")


def leaver(port: int, asked: Asked, seen: Seen, chance: random.Random) -> None:
    """Disconnect before, in the middle of or after the answer, sometimes with a reset."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(raw(port, asked))
        time.sleep(chance.uniform(0, 0.5))
        if chance.random() < 0.5:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    seen.counts["disconnects"] += 1


def slow(port: int, asked: Asked, seen: Seen, chance: random.Random) -> None:
    """Read the answer through a small buffer, a few bytes at a time."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", port))
        connection.settimeout(60)
        connection.sendall(raw(port, asked))
        read = b""
        while b"[DONE]" not in read and b"HTTP/1.1 429" not in read:
            new = connection.recv(256)
            if not new:
                break
            read += new
            time.sleep(0.05)
    if b"HTTP/1.1 200" in read:
        lines = [line for line in re.sub(rb"\r\n[0-9a-f]+\r\n", b"", read).split(b"\n") if line.startswith(b"data: {")]
        text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
        seen.counts["slow answers"] += 1
        if text != asked.text:
            seen.wrong.append(f"slow, {len(asked.prompt)} tokens: {text!r}, not {asked.text!r}")


def half(port: int, asked: Asked, seen: Seen, chance: random.Random) -> None:
    """Send a part of a request, and wait."""
    data = raw(port, asked)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(data[: chance.randrange(1, len(data))])
        time.sleep(chance.uniform(0, 3))
    seen.counts["half requests"] += 1


def nonsense(port: int, asked: Asked, seen: Seen, chance: random.Random) -> None:
    """Send bytes that are not HTTP."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(chance.randbytes(chance.randrange(1, 5000)))
        time.sleep(0.2)
    seen.counts["nonsense"] += 1


def idle(port: int, count: int, until: float) -> None:
    """Keep connections open that send nothing; open new ones when the server closes them."""
    connections: list[socket.socket] = []
    while time.monotonic() < until:
        for connection in connections[:]:
            connection.setblocking(False)
            try:
                closed = connection.recv(1) == b""
            except BlockingIOError:
                closed = False
            except OSError:
                closed = True
            if closed:
                connection.close()
                connections.remove(connection)
        while len(connections) < count:
            connections.append(socket.create_connection(("127.0.0.1", port)))
        time.sleep(1)
    for connection in connections:
        connection.close()


def repeat(act: Callable[..., None], port: int, pool: list[Asked], seen: Seen, seed: int, until: float) -> None:
    """Act again and again."""
    chance = random.Random(seed)
    while time.monotonic() < until:
        try:
            act(port, chance.choice(pool), seen, chance)
        except (ConnectionError, TimeoutError) as error:
            seen.counts[f"{act.__name__}: {type(error).__name__}"] += 1


def state(process: int) -> dict[str, int]:
    """The server's own memory in bytes, its open files and its threads."""
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+)", status), re.search(r"Threads:\s+(\d+)", status)
    assert found[0] and found[1]
    files = len(os.listdir(f"/proc/{process}/fd"))
    return {"own_memory": 1024 * int(found[0][1]), "files": files, "threads": int(found[1][1])}


def prompts(model: Path, port: int) -> list[Asked]:
    """Prompts of all lengths, and their answers alone."""
    from moepack.integrations.loading import open_tokenizer

    ids = open_tokenizer(model)(TEXT.read_text()[:40_000]).input_ids
    lengths = [*range(1, 33), *range(40, CONTEXT - LONGEST, 37), CONTEXT - LONGEST]
    pool = [Asked(ids[7 * n : 7 * n + n], 1 + n % LONGEST) for n in lengths]
    for asked in pool:
        asked.text, _ = answer(port, asked, False, [])
    return pool


def at_rest(port: int, process: int, slots: int, longest: list[int]) -> dict[str, int]:
    """The state of the server after all clients have left, with full kept caches."""
    time.sleep(3)
    for number in range(slots):
        answer(port, Asked([longest[number], *longest[:-1]], 1), False, [])
    return state(process)


def phase(options: argparse.Namespace, port: int, process: int, pool: list[Asked], seen: Seen) -> list[dict[str, int]]:
    """All clients at once, for a part of the time; states of the server."""
    until = time.monotonic() + 60 * options.minutes / options.phases
    acts = [polite] * options.clients + [leaver] * 8 + [slow] * 4 + [half] * 16 + [nonsense] * 2
    threads = [
        threading.Thread(target=repeat, args=(act, port, pool, seen, seed, until)) for seed, act in enumerate(acts)
    ]
    threads.append(threading.Thread(target=idle, args=(port, options.idle, until)))
    for thread in threads:
        thread.start()
    states = []
    while time.monotonic() < until:
        states.append(state(process))
        time.sleep(5)
    for thread in threads:
        thread.join()
    return states


def abuse(options: argparse.Namespace, port: int, process: int) -> dict[str, Any]:
    """All phases, and what was seen."""
    pool, seen = prompts(options.model, port), Seen()
    longest = max((asked.prompt for asked in pool), key=len)
    states, rests, requests = [], [], []
    for _ in range(options.phases):
        before = seen.counts.total()
        states += phase(options, port, process, pool, seen)
        requests.append(seen.counts.total() - before)
        rests.append(at_rest(port, process, options.slots, longest))
    memory = [each["own_memory"] for each in rests]
    firsts, last = sorted(seen.firsts), rests[-1]
    return {
        "minutes": options.minutes,
        "phases": options.phases,
        "clients": options.clients,
        "idle_connections": options.idle,
        "slots": options.slots,
        "counts": dict(seen.counts),
        "wrong": len(seen.wrong),
        "examples": seen.wrong[:5],
        "connect_worst": max(seen.connects),
        "first_token_median": statistics.median(firsts),
        "first_token_worst": firsts[-1],
        "own_memory": [each["own_memory"] for each in states],
        "memory_at_rest": memory,
        "requests": requests,
        "memory_growth_per_request": (memory[-1] - memory[0]) / sum(requests[1:]),
        "files_most": max(each["files"] for each in states),
        "files_after": last["files"],
        "threads_most": max(each["threads"] for each in states),
        "threads_after": last["threads"],
    }


def main() -> None:
    """Start a server, abuse it, judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", default=ROOT / "examples" / "tiny-moe")
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--phases", type=int, default=5, help="2 or more")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("build/abuse.json"))
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Answers are compared as text, so rounding that depends on who else is answered must not matter.
    exact = ["--dtype", "float32", "--mode", "exact", "--context", str(CONTEXT), "--slots", str(options.slots)]
    command = [sys.executable, "-m", "moepack", "serve", str(options.model), "--port", str(port), "--name", "abused"]
    with subprocess.Popen([*command, *exact], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr
        log: list[str] = []
        for line in server.stderr:
            if "running on" in line:
                break
        thread = threading.Thread(target=lambda: log.extend(server.stderr or ()))
        thread.start()
        try:
            figures = abuse(options, port, server.pid)
        finally:
            server.terminate()
            thread.join()
    figures["tracebacks"] = sum("Traceback" in line for line in log)
    print(json.dumps({name: value for name, value in figures.items() if name != "own_memory"}, indent=1))
    machine.save(options.out, len(os.sched_getaffinity(0)), figures)
    failures = (
        figures["wrong"] > 0,
        figures["first_token_worst"] > SECONDS,
        figures["memory_growth_per_request"] > GROWTH,
        figures["files_after"] > 100,
        figures["tracebacks"] > 0,
    )
    sys.exit(any(failures))


if __name__ == "__main__":
    main()
