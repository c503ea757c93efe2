"""Launches kernels at odd shapes, for compute-sanitizer: of decoding steps, and of layers of many tokens.

PYTHONPATH=python compute-sanitizer --tool memcheck python -m benches.gpu.sanitize
PYTHONPATH=python compute-sanitizer --tool racecheck python -m benches.gpu.sanitize

racecheck reports bulk copies into stages of a ring that warps have read (`gated_64` and `gated_96` of coded layers,
whose rings are short enough to be used again). The reads come first: lanes meet in `__syncwarp`, one of them arrives at
the barrier `empty`, and the copying warp waits for it (`cuda/common/grouped.cuh`). racecheck seems not to follow this.
"""

import torch
from torch import Tensor

from benches.gpu.cases import on_device, routing, specifications
from moepack.backends.gpu import coded_layer, dense, grouped, prompt_attention, router, step
from moepack.backends.gpu.attention import Attention
from moepack.backends.gpu.draw import draw
from moepack.backends.gpu.rooms import Rooms


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def attention() -> None:
    """Windows, sinks, free slots, and splits of a sequence."""
    attend = Attention(torch.device("cuda"))
    for batch, groups, group, capacity, width in [
        (1, 2, 8, 100, 128), (3, 1, 4, 1030, 64), (2, 2, 1, 37, 128), (1, 1, 12, 4100, 64), (1, 4, 8, 9, 256),
    ]:  # fmt: skip
        keys, values = (random(batch, groups, capacity, width) for _ in range(2))
        mask = torch.zeros(batch, capacity, device="cuda", dtype=torch.bfloat16)
        for given in (None, random(groups * group)):
            attend(random(batch, groups * group, width), keys, values, mask, width**-0.5, given)


def rooms(keys: list[Tensor], values: list[Tensor], read: list[tuple[int, int]], tile: int, window: int) -> Rooms:
    """Buffers of sequences, and rows of their next tokens, given the first and the number; padded to tiles."""
    sequence, place = [], []
    for number, (first, count) in enumerate(read):
        padding = -count % tile
        sequence += [number] * (count + padding)
        place += [*range(first, first + count)] + [-1] * padding
    capacity = [buffer.shape[1] for buffer in keys]
    addresses = ([buffer.data_ptr() for buffer in buffers] for buffers in (keys, values))
    return Rooms(
        *(torch.tensor(each, device="cuda") for each in (*addresses, capacity, sequence, place)), window=window
    )


def in_rooms() -> None:
    """Prompts and steps of sequences with full buffers of their own, with windows and sinks."""
    steps = Attention(torch.device("cuda"))
    for width, groups, group in [(128, 2, 8), (64, 3, 4), (64, 2, 1), (128, 1, 12), (64, 1, 7)]:
        heads, tile = groups * group, prompt_attention.tile_rows(group)
        for read, rows in [([(0, 100), (37, 1), (129, 65)], tile), ([(0, 1), (130, 1), (1000, 1)], 1)]:
            buffers = [[random(groups, first + count, width) for first, count in read] for _ in range(2)]
            attend = prompt_attention.attend if rows > 1 else steps.in_rooms
            for sinks, window in ((random(heads), 19), (None, 0)):
                held = rooms(*buffers, read, rows, window)
                total = len(held.place)
                attend(random(total, heads, width), held, groups, width**-0.5, sinks)
            norms, turns = (random(width), random(width)), (random(total, width), random(total, width))
            given = random(total, heads, width), random(total, groups, width), random(total, groups, width)
            step.prepare_heads_in_rooms(step.HeadRows(*given, *norms, 1e-6, *turns), held)
            torch.cuda.synchronize()


def others() -> None:
    """Routers, dense products, norms and heads."""
    for experts, top_k, sigmoid in [(128, 8, False), (60, 4, False), (160, 6, True), (8, 2, False)]:
        correction = random(experts, dtype=torch.float32) if sigmoid else None
        router.choose(random(3, experts), top_k, sigmoid=sigmoid, normalized=True, correction=correction)
    for tokens, columns, rows in [(1, 32, (16,)), (3, 352, (32, 16, 48)), (13, 1056, (16, 32)), (27, 544, (32,))]:
        dense.multiply(random(tokens, columns), [random(count, columns) for count in rows], [None] * len(rows))
    for rows, columns in [(1, 8), (3, 2048), (2, 2056)]:
        step.rms_norm(random(rows, columns), random(columns), 1e-6)
        step.add_norm(random(rows, columns), random(rows, columns), random(columns), 1e-6)
    for batch, heads, groups, width in [(1, 32, 4, 128), (3, 5, 1, 64)]:
        norms = random(width), random(width)
        turns = random(batch, width), random(batch, width)
        rows = step.HeadRows(
            random(batch, heads, width), *(random(batch, groups, width) for _ in range(2)), *norms, 1e-6, *turns
        )
        buffers = (random(batch, groups, 17, width) for _ in range(2))
        step.prepare_heads(rows, torch.full((1,), 11, device="cuda"), *buffers)


def drawn() -> None:
    """Rows of one block and of a team of blocks, with all settings."""
    settings = [[0.8, 0, 1, 0, 0.3], [1, 40, 1, 0, 0.9], [1, 0, 0.7, 0.1, 0.6], [0, 0, 1, 0, 0]]
    draws = torch.tensor(settings, dtype=torch.float64, device="cuda").T.contiguous()
    for columns in (301, 16391, 32768):
        for dtype in (torch.bfloat16, torch.float32):
            draw(random(len(settings), columns, dtype=dtype), draws)


def layers() -> None:
    """Layers whose tokens are sorted: integers; coded ones with outliers, decoded for tiles of tokens, and once."""
    generator = torch.Generator().manual_seed(0)
    for name in ("int4 group 64 asymmetric", "int3 row symmetric", "coded outliers", "coded 3 bits, dependent"):
        make = specifications(["groupwise", "coded"])[name]
        matrices = [on_device(make(5, *shape, seed)) for seed, shape in enumerate([(72, 520), (72, 520), (520, 72)])]
        for tokens in (9, 40, 70, 300):
            index, weights = routing(tokens, 3, 5, generator)
            experts = coded_layer.experts if name.startswith("coded") else grouped.experts
            experts(matrices, random(tokens, 520), index, weights)


if __name__ == "__main__":
    attention()
    drawn()
    layers()
    in_rooms()
    others()
    torch.cuda.synchronize()
    print("done")
