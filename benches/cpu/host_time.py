"""Processor time that serving one client takes outside the core, by thread, in microseconds per token.

    python -m benches.cpu.host_time MODEL [--tokens 64] [--answers 4] [--rounds 5]

The server runs in this process, and a client in another one requests streamed answers one after another. `engine` is
the time of the engine's thread outside the core's decoding step and head, `loop` that of the event loop (HTTP and
JSON), `guard` the check before each step that the model is unchanged. Prompts are read before the answer that counts
begins: a first answer to the same prompt leaves its keys and values. The kernels use one thread, so that the engine's
thread does their work. The round with the least time counts, because other load of the machine only adds to it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from benches.tools import machine
from moepack.backends.cpu import views
from moepack.integrations.loading import open_tokenizer, open_with
from moepack.integrations.options import LoadOptions
from moepack.serving.engine import Engine
from moepack.serving.http.server import Settings, create_app

NAME = "model"
CLIENT = """
import sys
from benches.cpu.serve import stream

port, tokens, answers = map(int, sys.argv[1:])
print(sum(stream(port, "model", tokens, 0, {"ignore_eos": True})[1] for _ in range(answers)))
"""


class Timed:
    """An object of the core whose method is timed in the calling thread.

    Attributes:
        spent: seconds of processor time in all such calls.
    """

    spent = 0.0

    def __init__(self, method: Callable[..., Any]) -> None:
        """Measure the calls of a method."""
        self._method = method

    def __call__(self, *args: Any) -> Any:
        """Call the method."""
        start = time.thread_time()
        found = self._method(*args)
        Timed.spent += time.thread_time() - start
        return found

    step = matmul = __call__  # the names under which the core's objects are called


def watch_core() -> None:
    """Time the core's decoding step and its dense products."""
    decode, product = views.decode, views.dense_product
    views.decode = lambda decoder, *args: decode(Timed(decoder.step), *args)  # type: ignore[arg-type]
    views.dense_product = lambda matrix, x: product(Timed(matrix.matmul), x)  # type: ignore[arg-type]


@contextmanager
def serving(engine: Engine, model: Path) -> Iterator[tuple[int, threading.Thread]]:
    """Serve in a thread; yield the port and the thread."""
    app = create_app(engine, Settings(NAME, model))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], thread
    finally:
        server.should_exit = True
        thread.join()


def clock(thread: threading.Thread) -> float:
    """Seconds of processor time that a thread has used."""
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def measure(port: int, threads: dict[str, threading.Thread], tokens: int, answers: int) -> dict[str, float]:
    """The microseconds per token of one round."""
    Timed.spent = 0.0
    before = {name: clock(thread) for name, thread in threads.items()}
    command = [sys.executable, "-c", CLIENT, str(port), str(tokens), str(answers)]
    made = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    used = {name: clock(thread) - before[name] for name, thread in threads.items()}
    used["engine"] -= Timed.spent
    return {name: 1e6 * seconds / made for name, seconds in {**used, "core": Timed.spent}.items()}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--answers", type=int, default=4, help="answers per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("build/host_time.json"))
    options = parser.parse_args()
    watch_core()
    model = open_with(options.model, LoadOptions(threads=1))
    engine = Engine(model, open_tokenizer(options.model))
    with serving(engine, options.model) as (port, loop):
        threads = {"engine": engine._thread, "loop": loop}
        measure(port, threads, options.tokens, 1)
        rounds = [measure(port, threads, options.tokens, options.answers) for _ in range(options.rounds)]
    figures = {name: min(found[name] for found in rounds) for name in rounds[0]}
    translation = model.model.forward._translation
    figures["guard"] = 1e3 * min(timeit.repeat(translation.holds, number=1000, repeat=5))
    print(", ".join(f"{name} {value:.0f} us" for name, value in figures.items()))
    machine.save(options.out, 1, figures)


if __name__ == "__main__":
    main()
