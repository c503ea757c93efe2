"""Measures serving over HTTP on a GPU: tokens per second and seconds to the first token, by number of clients.

The model is the made-up one of `models.py`; clients run in a process of their own, and send prompts of random tokens
one after another. "engine" is the rate without HTTP. Answers with a temperature are drawn with top-p.

    PYTHONPATH=python python -m benches.gpu.serve "int4 group 64 symmetric" [--clients 1 8 32] [--temperatures 0 0.7]
        [--results FILE]
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

from benches.gpu.cases import device_name

PORT, PROMPT, TOKENS, TOP_P = 8123, 64, 192, 0.95
NAME = "model"


def tokenizer(vocabulary: int) -> Any:
    """A tokenizer with a word for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({f"w{number}": number for number in range(vocabulary)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0")


async def answer(number: int, fields: dict[str, Any]) -> tuple[float, int]:
    """Request one streamed answer; seconds to its first token, and its tokens."""
    prompt = random.Random(number).choices(range(3, 4000), k=PROMPT)
    body = {"model": NAME, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    data = json.dumps(body | {"stream_options": {"include_usage": True}} | fields).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    start, first, count = time.perf_counter(), 0.0, 0
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    async for line in reader:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - start
            if b'"choices":[]' in line.replace(b" ", b""):
                count = json.loads(line[6:])["usage"]["completion_tokens"]
        elif line.startswith(b"data: [DONE]"):
            break
    writer.close()
    return first, count


async def load(clients: int, answers: int, fields: dict[str, Any]) -> dict[str, float]:
    """Run clients; each requests a number of answers."""

    async def client(number: int) -> list[tuple[float, int]]:
        return [await answer(number + 1000 * each, fields) for each in range(answers)]

    start = time.perf_counter()
    found = [each for one in await asyncio.gather(*map(client, range(clients))) for each in one]
    elapsed = time.perf_counter() - start
    firsts = sorted(first for first, _ in found)
    return {
        "tokens/s": round(sum(count for _, count in found) / elapsed, 1),
        "first token, ms": round(1000 * statistics.median(firsts), 1),
    }


def engine_rate(engine: Any, clients: int, temperature: float) -> float:
    """Tokens per second of the engine's thread alone."""
    from moepack.serving.text.sampling import Sampling

    ended = [threading.Event() for _ in range(clients)]
    sampling = Sampling(temperature, top_p=TOP_P, max_new_tokens=TOKENS, ignore_eos=True)
    start = time.perf_counter()
    for number, event in enumerate(ended):
        ids = random.Random(number).choices(range(3, 4000), k=PROMPT)
        engine.submit(ids, sampling, lambda piece, event=event: event.set() if piece.finish else None)
    for event in ended:
        event.wait(120)
    return round(clients * TOKENS / (time.perf_counter() - start), 1)


def served(engine: Any) -> Any:
    """Start a server for an engine, and the engine, in threads."""
    import uvicorn

    from moepack.serving.http.server import Settings, create_app

    config = uvicorn.Config(create_app(engine, Settings(NAME)), port=PORT, log_level="warning", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.05)
    return server


def main() -> None:
    """Run the measurements."""
    parser = argparse.ArgumentParser()
    parser.add_argument("specification")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--temperatures", type=float, nargs="*", default=[0.0])
    parser.add_argument("--results", type=Path)
    parser.add_argument("--send", type=int, nargs=2, help=argparse.SUPPRESS)  # clients and answers
    options = parser.parse_args()
    if options.send:
        fields = {"temperature": options.temperatures[0], "top_p": TOP_P}
        print(json.dumps(asyncio.run(load(*options.send, fields))))
        return
    from benches.gpu import models
    from moepack.decoding.decoder import DecoderForward
    from moepack.serving.engine import Engine

    models.LARGE["layers"] = options.layers
    model = models.large("cuda", options.specification)
    model.model.forward = DecoderForward(model.model)
    engine = Engine(model, tokenizer(model.config.vocab_size), slots=max(options.clients), context=4096)
    server, rows = served(engine), dict[str, Any]()
    for temperature, clients in product(options.temperatures, options.clients):
        engine_rate(engine, clients, temperature)  # the first one is slower
        command = [sys.executable, "-m", "benches.gpu.serve", "", "--temperatures", str(temperature), "--send"]
        found = subprocess.run([*command, str(clients), "2"], stdout=subprocess.PIPE, check=True).stdout
        rows[f"temperature {temperature}, {clients} clients"] = {
            "engine, tokens/s": engine_rate(engine, clients, temperature),
            **{f"HTTP, {name}": value for name, value in json.loads(found).items()},
        }
        print(rows, flush=True)
    server.should_exit = True
    if options.results:
        row = {"specification": options.specification, "layers": options.layers}
        options.results.write_text(json.dumps({**device_name(), "lines": [row | rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
