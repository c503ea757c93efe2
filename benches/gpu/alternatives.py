"""Times what could replace the kernels of decoding steps: steps compiled by Inductor, and the kernels of FlashInfer.

`inductor` is one decoding step of the decoder, without the head, of the made-up model of `models.py` behind 512 tokens:
with the kernels for layers, with transformers' operations in graphs, and compiled by `torch.compile` over
transformers' static cache. Compiled steps are recorded in a graph of this project; "reduce-overhead" uses those of
torch. Packed products are the same kernels everywhere, and so are the keys and values before the step. "difference" is
that of the third state, relative to the state of transformers' operations. Times are medians over rounds of steps, in
microseconds.

`flashinfer` is attention of one token per sequence, the sum with the residual and its norm, and the drawn token, each
beside the kernel of this project. Keys and values of FlashInfer are in pages of 16 tokens in random order, except those
of "single", and its plan, which the host makes before each step, is not timed. Times are medians of replayed graphs in
microseconds. FlashInfer compiles kernels with nvcc at first use.

A measurement that fails is recorded with its error, and the others go on. Lines are added to an existing file of
results.

    PYTHONPATH=python python -m benches.gpu.alternatives [--parts inductor flashinfer] [--batches 1 8 32]
        [--specification NAME] [--layers 8] [--modes default reduce-overhead] [--results FILE]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, StaticCache

from benches.gpu import models, operations
from benches.gpu.cases import device_name
from benches.gpu.kernels import profiled
from benches.gpu.operations import GROUPS, HEADS, HIDDEN, VOCABULARY, WIDTH, error, random, timed
from benches.gpu.steps import separate
from moepack.backends.gpu import step as step_kernels
from moepack.backends.gpu.attention import Attention
from moepack.backends.gpu.draw import draw
from moepack.backends.gpu.recording import record
from moepack.decoding.decoder import DecoderForward
from moepack.decoding.signature import cache_name

CONTEXT, CAPACITY, ROUNDS, STEPS = 512, 768, 7, 20
SEPARATE, FUSED = "transformers' operations", "kernels for layers"
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""The modes in which torch records graphs itself."""

ATTENTION = ((1, 512), (1, 8192), (1, 32768), (8, 2048), (8, 32768), (32, 512), (32, 2048), (32, 32768))
PAGE, WORKSPACE = 16, 1 << 28
TEMPERATURE, TOP_K, TOP_P = 0.7, 20, 0.95
SPREADS = (1.0, 4.0)
"""Standard deviations of logits."""

Note = Callable[[str, Callable[[], dict[str, Any]]], None]
Token = Tensor
"""The tokens of a step, [B, 1]."""

Past = list[tuple[Tensor, Tensor]]


@torch.inference_mode()
def past_of(model: Any, batch: int) -> Past:
    """Keys and values of random prompts, by layer."""
    ids = torch.randint(3, 4000, (batch, CONTEXT), generator=torch.Generator().manual_seed(1)).to(model.device)
    cache = DynamicCache(config=model.config)
    model.model(ids, use_cache=True, **_cached(model, cache))
    return [(layer.keys, layer.values) for layer in cache.layers]


def _cached(model: Any, cache: Cache) -> dict[str, Cache]:
    """The argument that holds the cache."""
    return {str(cache_name(type(model.model).forward)): cache}


def _filled(cache: Any, past: Past) -> Any:
    """A cache with keys and values."""
    for number, (keys, values) in enumerate(past):
        cache.update(keys, values, number)
    return cache


class Steps:
    """Decoding steps in recorded graphs of this project."""

    seconds: float | None = None
    """Until the first step had been compiled."""

    breaks = skips = 0
    """Breaks of the compiled function, and parts that torch did not record in graphs."""

    def __init__(self, model: Any, past: Past) -> None:
        self._model, self._cache = model, _filled(DynamicCache(config=model.config), past)
        model.model.forward = DecoderForward(model.model)

    def restart(self) -> None:
        """Continue after the prompt, if the cache has no room for another round."""

    def step(self, token: Token) -> Tensor:
        """Run a step; the next one overwrites the state [B, 1, H]."""
        output = self._model.model(token, use_cache=True, **_cached(self._model, self._cache))
        state: Tensor = output.last_hidden_state
        return state

    def close(self) -> None:
        """Restore the model."""
        vars(self._model.model).pop("forward", None)


class CompiledSteps(Steps):
    """Decoding steps compiled by `torch.compile`, over a static cache.

    Args:
        model: the whole model.
        past: keys and values of the prompts.
        mode: of the compiler.
    """

    def __init__(self, model: Any, past: Past, mode: str) -> None:
        self._cache = _filled(StaticCache(model.config, CAPACITY), past)
        batch, device, dtype = len(past[0][0]), past[0][0].device, past[0][0].dtype
        self._hidden = torch.finfo(dtype).min
        self._token = torch.full((batch, 1), 3, device=device)
        self._position = torch.full((batch, 1), CONTEXT, device=device)
        self._mask = torch.zeros(batch, 1, 1, CAPACITY, device=device, dtype=dtype)
        for tensor in (self._token, self._position, self._mask):
            torch._dynamo.mark_static_address(tensor)
        self._marks = mode in OWN_GRAPHS
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        forward = torch.compile(model.model.forward, mode=mode, dynamic=False)
        self._compiled = partial(
            forward, input_ids=self._token, attention_mask=self._mask, position_ids=self._position, use_cache=True,
            **_cached(model, self._cache),
        )  # fmt: skip
        self.restart()
        start = time.perf_counter()
        self._run()
        models.wait()
        self.seconds = round(time.perf_counter() - start, 1)
        self.breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
        for _ in range(2):
            self._run()
        self.skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        self._replay: Callable[[], Any] = self._run
        self._output: Tensor | None = None
        if not self._marks:
            self._replay, self._output = record(self._run, device)
        self.restart()

    def restart(self) -> None:
        """Continue after the prompt."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(CONTEXT)
        self._length = CONTEXT
        self._mask[..., CONTEXT:] = self._hidden

    def step(self, token: Token) -> Tensor:
        """Run a step; the next one overwrites the state [B, 1, H]."""
        self._token.copy_(token)
        self._position.fill_(self._length)
        self._mask[..., self._length].zero_()
        self._length += 1
        found = self._replay()
        state: Tensor = found if self._output is None else self._output
        return state

    def close(self) -> None:
        """Free what the compiler holds."""
        torch._dynamo.reset()

    def _run(self) -> Tensor:
        if self._marks:
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        state: Tensor = self._compiled().last_hidden_state
        return state


@torch.inference_mode()
def step_figures(make: Callable[[], Steps], tokens: Tensor, layers: int) -> tuple[dict[str, Any], Tensor]:
    """Figures of steps, and the third state."""
    steps = make()
    try:
        state = [steps.step(token).clone() for token in tokens[:3]][-1]
        for number in range(5):
            steps.step(tokens[number])
        times = [_round(steps, tokens) for _ in range(ROUNDS)][2:]
        median = statistics.median(times)
        found = {"us": round(median, 1), "us per layer": round(median / layers, 1)}
        steps.restart()
        launched = profiled(lambda: steps.step(tokens[0]))
        found |= {"kernels": len(launched), "busy us": round(sum(kernel.time for kernel in launched), 1)}
        if steps.seconds is not None:
            found |= {"compiled in s": steps.seconds, "graph breaks": steps.breaks, "not in graphs": steps.skips}
    finally:
        steps.close()
    return found, state


def _round(steps: Steps, tokens: Tensor) -> float:
    """Microseconds of a step, from a round of them."""
    steps.restart()
    models.wait()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for number in range(STEPS):
        steps.step(tokens[number])
    end.record()
    end.synchronize()
    return 1000 * float(begin.elapsed_time(end)) / STEPS


def inductor(note: Note, options: argparse.Namespace) -> None:
    """Measure steps by batch size and implementation."""
    models.LARGE["layers"] = options.layers
    model = models.large("cuda:0", options.specification)
    for batch in options.batches:
        past = past_of(model, batch)
        tokens = torch.randint(3, 4000, (STEPS, batch, 1), generator=torch.Generator().manual_seed(2)).to("cuda:0")
        states: dict[str, Tensor] = {}

        def measure(
            name: str, make: Callable[[], Steps], context: Any = nullcontext, tokens: Tensor = tokens,
            states: dict[str, Tensor] = states,
        ) -> dict[str, Any]:  # fmt: skip
            with context():
                found, states[name] = step_figures(make, tokens, options.layers)
            if SEPARATE in states:
                found["difference"] = round(error(states[name], states[SEPARATE].double()), 4)
            return found

        ways = {SEPARATE: partial(measure, SEPARATE, partial(Steps, model, past), separate)}
        ways[FUSED] = partial(measure, FUSED, partial(Steps, model, past))
        for mode in options.modes:
            name = f"Inductor, {mode}"
            ways[name] = partial(measure, name, partial(CompiledSteps, model, past, mode))
        for name, way in ways.items():
            note(f"{name}, {batch}", way)
            torch.cuda.empty_cache()


def paged(rows: Tensor, order: Tensor) -> Tensor:
    """Keys or values [B, groups, T, D] in pages [pages, groups, PAGE, D]; `order` [B * T / PAGE] has their numbers."""
    batch, groups, tokens, width = rows.shape
    pages = rows.view(batch, groups, tokens // PAGE, PAGE, width).transpose(1, 2).reshape(-1, groups, PAGE, width)
    found = torch.empty_like(pages)
    found[order.long()] = pages
    return found


def attention(batch: int, context: int) -> dict[str, Any]:
    """Microseconds of attention by FlashInfer's kernels and by the project's."""
    decode = import_module("flashinfer.decode")
    found: dict[str, Any] = dict(operations.attention_times(batch, context))
    pairs, q = operations.pairs_of(batch, context), random(batch, HEADS, WIDTH)
    order = torch.randperm(batch * context // PAGE, device="cuda", dtype=torch.int32)
    pages = [(paged(keys, order), paged(values, order)) for keys, values in pairs]
    space = torch.zeros(WORKSPACE, device="cuda", dtype=torch.uint8)
    starts = torch.arange(0, len(order) + 1, context // PAGE, device="cuda", dtype=torch.int32)
    last = torch.full((batch,), PAGE, device="cuda", dtype=torch.int32)
    lengths = torch.full((batch,), context, device="cuda", dtype=torch.int32).view(torch.uint32)

    def batched(tensor_cores: bool) -> Callable[[int], Tensor]:
        wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(
            space, "HND", use_cuda_graph=True, use_tensor_cores=tensor_cores, paged_kv_indptr_buffer=starts.clone(),
            paged_kv_indices_buffer=order.clone(), paged_kv_last_page_len_buffer=last.clone(),
        )  # fmt: skip
        wrapper.plan(
            starts, order, last, HEADS, GROUPS, WIDTH, PAGE, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
        )
        return lambda number: wrapper.run(q, pages[number % len(pages)])

    def xqa() -> Callable[[int], Tensor]:
        own, table = torch.zeros_like(space), order.view(batch, -1)
        return lambda number: decode.xqa_batch_decode_with_kv_cache(
            q, pages[number % len(pages)], own, table, lengths, context, bmm1_scale=WIDTH**-0.5, kv_layout="HND"
        )

    def single(tensor_cores: bool) -> Callable[[int], Tensor]:
        of = [(keys[0], values[0]) for keys, values in pairs]
        return lambda number: decode.single_decode_with_kv_cache(
            q[0], *of[number % len(of)], "HND", use_tensor_cores=tensor_cores
        )[None]

    mask = torch.zeros(batch, context, device="cuda", dtype=torch.bfloat16)
    expected = Attention(torch.device("cuda"))(q, *pairs[0], mask, WIDTH**-0.5)
    assert expected is not None
    ways: dict[str, Callable[[], Callable[[int], Tensor]]] = {
        "CUDA cores": partial(batched, False), "tensor cores": partial(batched, True), "XQA": xqa,
    }  # fmt: skip
    if batch == 1:
        ways |= {"single, CUDA cores": partial(single, False), "single, tensor cores": partial(single, True)}
    for name, way in ways.items():
        with noted(found, f"FlashInfer, {name}"):
            function = way()
            found[f"difference, {name}"] = error(function(0), expected.double())
            found[f"FlashInfer, {name}"] = timed(function)
    return found


def sums(rows: int) -> dict[str, Any]:
    """Microseconds of the sum with the residual and its norm."""
    fused = import_module("flashinfer.norm").fused_add_rmsnorm
    x, addend, weight = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN)
    total, normed = step_kernels.add_norm(x, addend, weight, 1e-6)
    given, held = addend.clone(), x.clone()
    fused(given, held, weight, 1e-6)
    wide = addend.float()
    return {
        "difference": max(error(given, normed.double()), error(held, total.double())),
        "kernel": timed(lambda _: step_kernels.add_norm(x, addend, weight, 1e-6)),
        "kernel, float32 addend": timed(lambda _: step_kernels.add_norm(x, wide, weight, 1e-6)),
        "FlashInfer": timed(lambda _: fused(given, held, weight, 1e-6)),
    }


def drawn(rows: int, spread: float) -> dict[str, Any]:
    """Microseconds of drawn tokens from bfloat16 logits, with top-k and top-p or with top-p alone."""
    sampling = import_module("flashinfer.sampling")
    logits = [random(rows, VOCABULARY) * spread for _ in range(4)]
    seed, offset = (torch.tensor([value], device="cuda") for value in (5, 0))
    single = {"deterministic": True, "seed": seed, "offset": offset}
    full = partial(torch.full, (rows,), device="cuda")
    temperatures, limits, masses = full(TEMPERATURE), full(TOP_K, dtype=torch.int32), full(TOP_P)
    found: dict[str, Any] = {}

    def scaled(number: int) -> Tensor:
        return logits[number % len(logits)].float() / TEMPERATURE

    def softmax(number: int, temperature: float | Tensor = TEMPERATURE) -> Tensor:
        probabilities: Tensor = sampling.softmax(logits[number % len(logits)], temperature)
        return probabilities

    def own(number: int, top_k: int) -> Tensor:
        return draw(logits[number % len(logits)], draws[top_k])

    draws = {
        top_k: torch.tensor([[TEMPERATURE], [top_k], [TOP_P], [0.0], [0.4]], dtype=torch.float64, device="cuda")
        .expand(-1, rows)
        .contiguous()
        for top_k in (0, TOP_K)
    }
    ways: dict[str, Callable[[int], Tensor]] = {
        "top-k and top-p, kernel": partial(own, top_k=TOP_K),
        "top-k and top-p, FlashInfer, logits": lambda number: sampling.top_k_top_p_sampling_from_logits(
            scaled(number), TOP_K, TOP_P, **single
        ),
        "top-k and top-p, FlashInfer, logits, by row": lambda number: sampling.top_k_top_p_sampling_from_logits(
            scaled(number), limits, masses, top_k_max=TOP_K, **single
        ),
        "top-k and top-p, FlashInfer, probabilities": lambda number: sampling.top_k_top_p_sampling_from_probs(
            softmax(number), TOP_K, TOP_P, **single
        ),
        "top-k and top-p, FlashInfer, probabilities, joint": lambda number: sampling.top_k_top_p_sampling_from_probs(
            softmax(number), TOP_K, TOP_P, filter_apply_order="joint", **single
        ),
        "top-p, kernel": partial(own, top_k=0),
        "top-p, FlashInfer, probabilities": lambda number: sampling.top_p_sampling_from_probs(
            softmax(number), TOP_P, **single
        ),
        "top-p, FlashInfer, probabilities, by row": lambda number: sampling.top_p_sampling_from_probs(
            softmax(number, temperatures), masses, **single
        ),
    }
    likeliest = logits[0].topk(TOP_K).values[:, -1]
    for name, function in ways.items():
        with noted(found, name):
            tokens = function(0).long()
            if name.startswith("top-k"):
                least = logits[0].gather(1, tokens[:, None])[:, 0]
                assert bool((least >= likeliest).all()), "a token is not one of the likeliest"
            found[name] = timed(function)
    return found


def flashinfer(note: Note, options: argparse.Namespace) -> None:
    """Measure operations by number of rows."""
    for rows in options.batches:
        note(f"sum and norm, {rows}", partial(sums, rows))
    for rows in options.batches:
        for spread in SPREADS:
            note(f"drawn token, {rows} rows, deviation {spread:g}", partial(drawn, rows, spread))
    for batch, context in ATTENTION:
        note(f"attention, {batch} x {context}", partial(attention, batch, context))
        torch.cuda.empty_cache()


PARTS = {"inductor": inductor, "flashinfer": flashinfer}


@contextmanager
def noted(rows: dict[str, Any], name: str) -> Iterator[None]:
    """Note an error under a name, and go on."""
    try:
        yield
    except Exception as failure:
        rows[name] = f"{type(failure).__name__}: {str(failure).strip()[:400]}"


def _rounded(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) and value < 100 else value


def _version(name: str) -> str | None:
    """The version of a package; None if it cannot be imported."""
    try:
        found: str = import_module(name).__version__
    except Exception:
        return None
    return found


def main() -> None:
    """Run the parts; each line of results is kept as soon as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--specification", default="int4 group 64 symmetric")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--modes", nargs="*", choices=MODES, default=["default", "reduce-overhead"])
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    settings = {"specification": options.specification, "layers": options.layers}
    versions = {name: found for name in ("triton", "transformers", "flashinfer") if (found := _version(name))}
    given = options.results and options.results.exists()
    earlier: dict[str, Any] = json.loads(options.results.read_text()) if given else {}
    lines: dict[str, Any] = earlier.get("lines", {})

    def note(name: str, function: Callable[[], dict[str, Any]]) -> None:
        lines[name] = {}
        with noted(lines, name):
            lines[name] = {key: _rounded(value) for key, value in function().items()}
        print(name, lines[name], flush=True)
        if options.results:
            found = {**earlier, **device_name(), **versions, **settings, "lines": lines}
            options.results.write_text(json.dumps(found, indent=1) + "\n")

    for part in options.parts:
        try:
            PARTS[part](note, options)
        except Exception as failure:
            print(part, "ended:", f"{type(failure).__name__}: {failure}", flush=True)


if __name__ == "__main__":
    main()
