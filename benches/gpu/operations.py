"""Checks and times the kernels of decoding steps other than products of packed weights, beside torch's operations.

Shapes are those of Qwen3-30B-A3B. Checks compare with float64; times are medians of replayed graphs in microseconds,
with weights, keys and values outside the cache.

    PYTHONPATH=python python -m benches.gpu.operations [--results FILE]
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benches.gpu.cases import device_name
from moepack.backends.gpu import dense, prompt_attention, router, step
from moepack.backends.gpu.attention import Attention
from moepack.backends.gpu.draw import draw
from moepack.backends.gpu.rooms import Rooms
from moepack.decoding.narrow import decode, encode
from moepack.serving.text.sampling import Sampler, Sampling

HEADS, GROUPS, WIDTH, HIDDEN, EXPERTS, TOP_K, VOCABULARY = 32, 4, 128, 2048, 128, 8, 151_936
BATCHES, CONTEXTS = (1, 8, 32), (512, 2048, 8192, 32768)
LARGEST, OUTSIDE = 2.3e9, 3e8
"""Maximum bytes of keys and values, and bytes that exceed the L2 cache."""


def timed(function: Callable[[int], Any], count: int = 20) -> float:
    """Median microseconds of a call; it gets the number of the call."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for number in range(3):
            function(number)
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for number in range(count):
            function(number)
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end) / count)
    return statistics.median(times[2:])


def random(*shape: int) -> Tensor:
    """Normal values on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error; NaN never passes."""
    return float((found.double() - expected).norm() / expected.norm())


def attention_error(batch: int, groups: int, group: int, capacity: int, width: int, dtype: torch.dtype) -> float:
    """The error of attention with padding, a window and free slots."""
    attend = Attention(torch.device("cuda"))
    q = random(batch, groups * group, width).to(dtype)
    k, v = (random(batch, groups, capacity, width).to(dtype) for _ in range(2))
    mask = torch.zeros(batch, capacity, device="cuda", dtype=dtype)
    mask[:, capacity - capacity // 3 :] = mask[0, : capacity // 4] = torch.finfo(dtype).min
    sinks = random(groups * group).to(dtype)
    worst = 0.0
    for given in (None, sinks):
        found = attend(q, k, v, mask, width**-0.5, given)
        assert found is not None
        repeated = [each.double().repeat_interleave(group, 1) for each in (k, v)]
        scores = torch.einsum("bhd,bhtd->bht", q.double(), repeated[0]) * width**-0.5 + mask[:, None].double()
        if given is not None:
            scores = torch.cat([scores, given.double()[None, :, None].expand(batch, -1, 1)], -1)
        expected = torch.einsum("bht,bhtd->bhd", scores.softmax(-1)[..., :capacity], repeated[1])
        worst = max(worst, error(found, expected))
    return worst


def rooms_of(keys: Tensor, values: Tensor, sequence: list[int], place: list[int], window: int = 0) -> Rooms:
    """Rooms of sequences in one tensor [S, groups, capacity, row] of keys, and one of values."""
    starts = torch.arange(len(keys), device="cuda") * keys.stride(0) * keys.element_size()
    rows = (torch.tensor(each, device="cuda") for each in (sequence, place))
    capacity = torch.full((len(keys),), keys.shape[2], device="cuda")
    addresses = (starts + each.data_ptr() for each in (keys, values))
    return Rooms(*addresses, capacity, *rows, keys.dtype is torch.int8, window)


def rooms_error(groups: int, group: int, lengths: list[int], width: int, window: int, is_prompt: bool) -> float:
    """The worst error of attention to keys and values in 8 bits: single tokens, or whole prompts."""
    capacity, worst = max(lengths) + 5 - (max(lengths) + 5) % -4, 0.0
    for dtype in (torch.bfloat16, torch.float16):
        k, v = (random(len(lengths), groups, capacity, width).to(dtype) for _ in range(2))
        v *= torch.logspace(-3, 0, capacity, device="cuda", dtype=dtype)[:, None]
        stored = encode(k), encode(v)
        for number, length in enumerate(lengths):
            for each in stored:
                each[number, :, length:] = -1
        sequence, place = [], []
        tile = prompt_attention.tile_rows(group)
        for number, length in enumerate(lengths):
            rows = -(-length // tile) * tile if is_prompt else 1
            sequence += [number] * rows
            place += [*range(length), *[-1] * (rows - length)] if is_prompt else [length - 1]
        q = random(len(place), groups * group, width).to(dtype)
        rooms = rooms_of(*stored, sequence, place, window)
        attend = prompt_attention.attend if is_prompt else Attention(torch.device("cuda")).in_rooms
        found = attend(q, rooms, groups, width**-0.5, None)
        for row, (number, last) in enumerate(zip(sequence, place, strict=True)):
            if last < 0 or row % 7:
                continue
            first = max(0, last + 1 - window) if window else 0
            both = (decode(each[number, :, first : last + 1], torch.float32).double() for each in stored)
            keys, values = (each.repeat_interleave(group, 0) for each in both)
            weights = (torch.einsum("hd,htd->ht", q[row].double(), keys) * width**-0.5).softmax(-1)
            worst = max(worst, error(found[row], torch.einsum("ht,htd->hd", weights, values)))
    return worst


def check() -> dict[str, float]:
    """Relative errors."""
    found = {}
    for groups, group, lengths, width, window in [
        (4, 8, [777, 3, 4100], 128, 0), (2, 1, [64, 130], 64, 50), (8, 8, [1500, 20], 64, 128),
    ]:  # fmt: skip
        for is_prompt in (False, True):
            name = f"{'prompts' if is_prompt else 'steps'} in 8 bits, {groups} x {group}, {lengths} tokens of {width}"
            found[name] = rooms_error(groups, group, lengths, width, window, is_prompt)
    for batch, groups, group, capacity, width in [
        (1, 4, 8, 777, 128), (5, 2, 1, 64, 64), (3, 2, 12, 4099, 64), (2, 1, 16, 1500, 256), (40, 4, 8, 1030, 128),
    ]:  # fmt: skip
        for dtype in (torch.bfloat16, torch.float16):
            name = f"attention {batch} x {groups} x {group}, {capacity} tokens of {width}, {dtype}"
            found[name] = attention_error(batch, groups, group, capacity, width, dtype)
    for tokens, rows in [
        (1, (4096, 512, 512)),
        (5, (2048,)),
        (16, (128, 48)),
        (9, (64, 16, 16)),
        (27, (4096, 512, 512)),
    ]:
        weights = [random(count, 1056) * 1056**-0.5 for count in rows]
        biases = [random(count) if count % 32 else None for count in rows]
        x = random(tokens, 1056)
        expected = torch.cat(
            [
                x.double() @ w.double().T + (0 if b is None else b.double())
                for w, b in zip(weights, biases, strict=True)
            ],
            1,
        )
        found[f"product of {tokens}, {rows}"] = error(dense.multiply(x, weights, biases), expected)
    for experts, top_k in ((128, 8), (512, 10), (60, 4)):
        logits = torch.randn(37, experts, device="cuda")
        index, weights_ = router.choose(logits, top_k, normalized=True)
        values, places = logits.double().softmax(-1).topk(top_k)
        assert torch.equal(index, places)
        found[f"weights of {top_k} of {experts} experts"] = error(weights_, values / values.sum(-1, keepdim=True))
    x, addend, weight = random(33, HIDDEN), torch.randn(33, HIDDEN, device="cuda"), random(HIDDEN)
    total, normed = step.add_norm(x, addend, weight, 1e-6)
    assert torch.equal(total, x + addend.bfloat16())
    wide = total.double()
    found["drawn tokens"] = draw_error()
    found["sum and norm"] = error(normed, wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double())
    return found


def draws_of(rows: int) -> tuple[list[Sampler], Tensor]:
    """Samplers of several settings, and their draws."""
    settings = ({"top_p": 0.95}, {"top_k": 20, "top_p": 0.95}, {"min_p": 0.05}, {})
    samplers = [Sampler(Sampling(0.7, seed=row, **settings[row % len(settings)])) for row in range(rows)]  # type: ignore[arg-type]
    return samplers, torch.tensor([sampler.draw(0) for sampler in samplers], dtype=torch.float64).T.contiguous().cuda()


def draw_error() -> float:
    """The share of drawn tokens that differ from the sampler of one sequence, whose sums round differently."""
    (samplers, draws), logits = draws_of(64), torch.randn(64, VOCABULARY, device="cuda")
    expected = [sampler.choose(row, []) for sampler, row in zip(samplers, logits, strict=True)]
    return sum(one != other for one, other in zip(draw(logits, draws).tolist(), expected, strict=True)) / 64


def bytes_of(batch: int, context: int) -> int:
    """The bytes of keys and values of some sequences."""
    return batch * GROUPS * context * WIDTH * 4


def pairs_of(batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
    """Keys and values [B, groups, T, D], up to six times, so that long ones are not in the cache."""
    copies = max(1, min(6, int(OUTSIDE / bytes_of(batch, context))))
    return [(random(batch, GROUPS, context, WIDTH), random(batch, GROUPS, context, WIDTH)) for _ in range(copies)]


def attention_times(batch: int, context: int) -> dict[str, float]:
    """Microseconds of attention over a context, with a mask that hides nothing."""
    pairs, attend = pairs_of(batch, context), Attention(torch.device("cuda"))
    q, mask = random(batch, HEADS, WIDTH), torch.zeros(batch, context, device="cuda", dtype=torch.bfloat16)
    copies = len(pairs)

    def grouped(number: int) -> Tensor:
        k, v = pairs[number % copies]
        return functional.scaled_dot_product_attention(
            q[:, :, None], k, v, attn_mask=mask[:, None, None], enable_gqa=True
        )

    def tokens(number: int) -> Tensor:
        k, v = pairs[number % copies]
        return functional.scaled_dot_product_attention(
            q.view(batch, GROUPS, -1, WIDTH), k, v, attn_mask=mask[:, None, None]
        )

    rows, last = list(range(batch)), [context - 1] * batch
    narrow = [tuple(map(encode, pair)) for pair in pairs]
    rooms = [[rooms_of(*pair, rows, last) for pair in of] for of in (pairs, narrow)]

    def in_rooms(number: int, of: list[Rooms]) -> Tensor:
        return attend.in_rooms(q, of[number % copies], GROUPS, WIDTH**-0.5)

    return {
        "bytes at 3 TB/s": bytes_of(batch, context) / 3e6,
        "rooms": timed(lambda number: in_rooms(number, rooms[0])),
        "rooms in 8 bits": timed(lambda number: in_rooms(number, rooms[1])),
        "kernel": timed(lambda number: attend(q, *pairs[number % copies], mask, WIDTH**-0.5)),
        "sdpa, grouped": timed(grouped),
        "sdpa, heads as tokens": timed(tokens),
    }


def prompt_times(tokens: int) -> dict[str, float]:
    """Microseconds of attention of one prompt."""
    q = random(tokens, HEADS, WIDTH)
    pair = random(1, GROUPS, tokens, WIDTH), random(1, GROUPS, tokens, WIDTH)
    of = {"rooms": pair, "rooms in 8 bits": tuple(map(encode, pair))}
    rooms = {name: rooms_of(*held, [0] * tokens, list(range(tokens))) for name, held in of.items()}
    return {
        name: timed(lambda _, each=each: prompt_attention.attend(q, each, GROUPS, WIDTH**-0.5))
        for name, each in rooms.items()
    }


def product_times(batch: int, *rows: int, columns: int = HIDDEN) -> dict[str, float]:
    """Microseconds of products with matrices of some rows."""
    copies = max(2, int(1.5e8 / (sum(rows) * columns * 2)))
    x, none = random(batch, columns), [None] * len(rows)
    sets = [[random(count, columns) for count in rows] for _ in range(copies)]

    def separate(number: int) -> list[Tensor]:
        return [functional.linear(x, weight) for weight in sets[number % copies]]

    times = {"bytes at 3 TB/s": sum(rows) * columns * 2 / 3e6, "cuBLAS": timed(separate)}
    if batch <= dense.MOST_TOKENS:
        for warps in (4, 8, 16):
            times[f"kernel, {warps} warps"] = timed(
                lambda number, warps=warps: dense.multiply(x, sets[number % copies], none, warps)
            )
    return times


def small_times(batch: int) -> dict[str, float]:
    """Microseconds of what is neither attention nor a product."""
    x, addend, weight = random(batch, HIDDEN), torch.randn(batch, HIDDEN, device="cuda"), random(HIDDEN)
    logits, joint = random(batch, EXPERTS), random(batch, HEADS + 2 * GROUPS, WIDTH)
    keys, values = (random(batch, GROUPS, 1024, WIDTH) for _ in range(2))
    cos, sin, norm = random(batch, WIDTH), random(batch, WIDTH), random(WIDTH)
    place, vocabulary, (_, draws) = torch.tensor([7], device="cuda"), random(batch, VOCABULARY), draws_of(batch)
    heads = step.HeadRows(*joint.split([HEADS, GROUPS, GROUPS], 1), norm, norm, 1e-6, cos, sin)
    return {
        "sum and norm": timed(lambda _: step.add_norm(x, addend, weight, 1e-6)),
        "choice": timed(lambda _: router.choose(logits, TOP_K, normalized=True)),
        "heads": timed(lambda _: step.prepare_heads(heads, place, keys, values)),
        "drawn tokens": timed(lambda _: draw(vocabulary, draws)),
    }


def main() -> None:
    """Check, then time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    lines: dict[str, Any] = {}

    def note(name: str, row: dict[str, float]) -> None:
        lines[name] = {key: float(f"{value:.3g}") for key, value in row.items()}
        print(name, lines[name], flush=True)

    note("errors", check())
    for batch in BATCHES:
        note(f"small, {batch}", small_times(batch))
        note(f"q, k, v, {batch}", product_times(batch, HEADS * WIDTH, GROUPS * WIDTH, GROUPS * WIDTH))
        note(f"output, {batch}", product_times(batch, HIDDEN, columns=HEADS * WIDTH))
        note(f"router, {batch}", product_times(batch, EXPERTS))
        for context in CONTEXTS:
            if bytes_of(batch, context) < LARGEST:
                note(f"attention, {batch} x {context}", attention_times(batch, context))
    for tokens in (512, 2048):
        note(f"prompt of {tokens}", prompt_times(tokens))
    if options.results:
        options.results.write_text(json.dumps({**device_name(), "lines": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
