"""Measures `moepack serve`, and llama.cpp's server if installed, under load: first token, tokens per second, memory.

    python -m benches.cpu.serve MODEL [--clients 1 8 64] [--tokens 32] [--minutes 0] [--threads 2]
    python -m benches.cpu.serve MODEL --schema [--clients 1 8] [--rounds 5]
    python -m benches.cpu.serve --random [--clients 1 8] [--directory build/serve]

Each client requests streamed answers one after another. Prompts start differently, and no server gets one twice,
because servers keep the keys and values of earlier prompts; token counts are those reported by the servers. Decoding is
greedy, and answers end only if the model ends them. With `--minutes`, the last number of clients runs for that long,
and the server's memory is reported over time: growth after the first quarter is a leak.

`--schema` alternates between free answers and answers that follow a JSON schema, of the same number of tokens. Medians
over rounds count, and the best rounds, which other load of the machine disturbs least.

`--random` creates the random model of `benches/cpu/llama.py` with a tokenizer: in four bits (groups of 32, 8-bit
activations), the same weights exported by `moepack export --to gguf` for llama.cpp's own server (xllamacpp from PyPI),
and random 4-bit codebook codes. The servers alternate `--rounds` times, and medians over rounds count; only one runs at
a time. Each serves as many requests concurrently as there are clients."""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benches.cpu import llama
from benches.tools import machine

HEADERS = {"Content-Type": "application/json"}
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "title": {"type": "string", "maxLength": 40},
            "done": {"type": "boolean"},
        },
        "required": ["id", "title", "done"],
        "additionalProperties": False,
    },
}
"""A schema that no answer completes, so all answers have the same number of tokens."""
TEXT = "{number} clients asked. She opened the door and saw that the sea was not where it had been, and then"


@contextmanager
def running(command: list[str], port: int) -> Iterator[int]:
    """The process id of a server, once it answers."""
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            while True:
                try:
                    if ask(port, "GET", "/v1/models").status == 200:
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


def stream(port: int, name: str, tokens: int, number: int, fields: Any = None) -> tuple[float, int]:
    """Request one answer, with further fields: seconds to its first piece, and its tokens."""
    body = {"model": name, "prompt": TEXT.format(number=number), "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **(fields or {})}
    start, first, made = time.perf_counter(), 0.0, 0
    response = ask(port, "POST", "/v1/completions", body)
    assert response.status == 200, response.read()
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            made = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", made)
    return first, made


def load(
    port: int, name: str, clients: int, tokens: int, seconds: float, numbers: Iterator[int], fields: Any = None
) -> dict[str, float]:
    """Run clients that send requests, with the next numbers in their prompts, for some time."""
    until, start = time.perf_counter() + seconds, time.perf_counter()

    def client(_: int) -> list[tuple[float, int]]:
        answers = [stream(port, name, tokens, next(numbers), fields)]
        while time.perf_counter() < until:
            answers.append(stream(port, name, tokens, next(numbers), fields))
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


def processor_seconds(process: int) -> float:
    """Seconds of processor time that a process has used, in all of its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def own_memory(process: int) -> int:
    """Bytes of a process without mapped files."""
    found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{process}/status").read_text())
    assert found
    return 1024 * int(found[1])


def free_port() -> int:
    """A port that no server uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def compared(speeds: dict[str, dict[str, list[float]]], clients: int) -> dict[str, Any]:
    """Medians and best rounds of both sides by kind of time, and their ratios."""
    figures: dict[str, Any] = {}
    for kind in ("clock", "processor"):
        for name, summary in (("median", statistics.median), ("best", max)):
            free, schema = (summary(found[kind]) for found in speeds.values())
            figures[f"{kind}, {name}"] = {"free": free, "schema": schema, "ratio": schema / free}
            print(f"{clients} clients, {kind}, {name}: free {free:.4g}, schema {schema:.4g}, {schema / free:.3f}")
    return figures


def constrained(command: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second, and per second of the server's processor time, with and without a schema, alternating."""
    sides = {"free": {"ignore_eos": True}, "schema": {"ignore_eos": True, "guided_json": SCHEMA}}
    port, figures = free_port(), {}
    with running(command, port) as process:
        model = json.load(ask(port, "GET", "/v1/models"))["data"][0]["id"]
        for clients in options.clients:
            speeds: dict[str, dict[str, list[float]]] = {side: {"clock": [], "processor": []} for side in sides}
            for number in range(options.rounds + 1):  # the first round compiles the grammar and does not count
                for side, fields in sides.items():
                    before = processor_seconds(process)
                    found = load(port, model, clients, options.tokens, options.seconds, itertools.count(), fields)
                    if number:
                        speeds[side]["clock"].append(found["tokens_per_second"])
                        used = processor_seconds(process) - before
                        speeds[side]["processor"].append(found["answers"] * options.tokens / used)
            figures[str(clients)] = compared(speeds, clients)
    return figures


def measure(name: str, command: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """All figures of a server."""
    port = free_port()
    figures: dict[str, Any] = {}
    numbers = itertools.count()
    with running(command, port) as process:
        model = json.load(ask(port, "GET", "/v1/models"))["data"][0]["id"]
        stream(port, model, 4, next(numbers))
        for clients in options.clients:
            figures[str(clients)] = found = load(port, model, clients, options.tokens, options.seconds, numbers)
            print(f"{name}, {clients} clients: " + ", ".join(f"{k} {v:.3g}" for k, v in found.items()), flush=True)
        memory, until = [own_memory(process)], time.monotonic() + 60 * options.minutes
        while time.monotonic() < until:
            load(port, model, options.clients[-1], options.tokens, 5.0, numbers)
            memory.append(own_memory(process))
        figures["own_memory"] = memory
        print(f"{name}, own memory in MB: " + " ".join(f"{count / 1e6:.0f}" for count in memory), flush=True)
    return figures


def tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer with at most as many tokens as the model."""
    import tokenizers
    import transformers

    text = Path(__file__).parents[2] / "examples/texts/white-fang.txt"
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=llama.VOCABULARY - 1, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    made.train([str(text)], trainer)
    made.add_special_tokens(["</s>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>").save_pretrained(directory)


def random_models(directory: Path) -> dict[str, Path]:
    """The random model by side, built if missing."""
    from moepack.export import export
    from moepack.methods.finequant import FineQuant
    from moepack.pipeline import compress

    methods = {
        "int4": FineQuant(bits=4, group_size=32, dense_bits=4, calibration=None),
        "codebook": llama.random_method(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    if missing := [name for name in methods if not (directory / name).exists()]:
        with tempfile.TemporaryDirectory(dir=directory) as model:
            llama.source(Path(model))
            tokenizer(Path(model))
            for name in missing:
                compress(model, directory / name, method=methods[name])
    if not (directory / "int4.gguf").exists():
        export(directory / "int4", directory / "int4.gguf", "gguf")
    return {name: directory / name for name in ("int4", "codebook", "int4.gguf")}


def peer(options: argparse.Namespace) -> None:
    """Run llama.cpp's server until it is stopped."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.hostnames, settings.port = str(options.peer), ["127.0.0.1"], options.port
    settings.n_parallel, settings.n_ctx, settings.fit_params = options.slots, 512 * options.slots, False
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = options.threads
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    signal.pause()


def contest(commands: dict[str, list[str]], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of alternating servers: medians over rounds."""
    rounds = [
        {name: measure(name, command, options) for name, command in commands.items()} for _ in range(options.rounds)
    ]
    figures: dict[str, Any] = {}
    for name in commands:
        for clients in map(str, options.clients):
            found = [each[name][clients] for each in rounds]
            medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
            figures.setdefault(name, {})[clients] = medians
            print(f"{name}, {clients} clients, medians: " + ", ".join(f"{k} {v:.3g}" for k, v in medians.items()))
    return figures


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--random", action="store_true", help="compare the random model with llama.cpp's server")
    parser.add_argument("--schema", action="store_true", help="compare free answers with those of a JSON schema")
    parser.add_argument("--directory", type=Path, default=Path("build/serve"), help="folder for the random model")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both servers")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for each number of clients")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/serve.json"))
    for name, kind in (("--peer", Path), ("--port", int), ("--slots", int)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print and save."""
    options = arguments()
    if options.peer:
        return peer(options)
    settings = ["--slots", str(max(options.clients)), "--threads", str(options.threads)]
    serve = [sys.executable, "-m", "moepack", "serve"]
    if options.random:
        models = random_models(options.directory)
        commands = {
            "moepack int4": [*serve, str(models["int4"]), *settings, "--mode", "int8"],
            "moepack codebook": [*serve, str(models["codebook"]), *settings],
            "llama.cpp Q4_0": [sys.executable, "-m", __spec__.name, "--peer", str(models["int4.gguf"]), *settings],
        }
        figures = contest(commands, options)
    elif options.schema:
        figures = constrained([*serve, str(options.model), *settings], options)
    else:
        figures = {"moepack": measure("moepack", [*serve, str(options.model), *settings], options)}
    machine.save(options.out, options.threads, figures)
    return None


if __name__ == "__main__":
    main()
