"""Launches the kernels of decoding steps other than products of packed weights at odd shapes, for compute-sanitizer.

PYTHONPATH=python compute-sanitizer --tool memcheck python -m benches.gpu.sanitize
PYTHONPATH=python compute-sanitizer --tool racecheck python -m benches.gpu.sanitize
"""

import torch
from torch import Tensor

from moepack.backends.gpu import dense, router, step
from moepack.backends.gpu.attention import Attention


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


if __name__ == "__main__":
    attention()
    others()
    torch.cuda.synchronize()
    print("done")
