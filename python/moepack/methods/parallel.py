"""Experts in parallel.

Torch splits each operation over its threads and waits for all of them after each; for matrices of the size of an
expert, and on a machine that has other work, the waiting costs more than the work (measured: 15 times slower on two
cores under load). Here each thread takes whole experts instead, and each operation runs in one.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_WORKERS = 8
"""Most experts in work at a time: each may need 40 MB of temporaries, and memory is bounded for any number of cores."""


def for_experts(
    work: Callable[[int], None], experts: int, done: Callable[[], None], *, most: int = MAX_WORKERS, alone: bool = False
) -> None:
    """Call `work` with each expert's number, in parallel over as many threads as torch is set to use.

    Args:
        work: called once an expert, from any thread.
        experts: how many there are.
        done: called in this thread after each expert, in order.
        most: experts in work at a time, at most; 1 where each needs much memory.
        alone: every operation runs in one thread even where there is only one expert, so that sums, and what follows
            from them, never depend on the number of threads.

    Raises:
        Exception: what `work` raised for the first expert that failed.
    """
    threads = torch.get_num_threads()
    workers = min(threads, MAX_WORKERS, most, experts)
    if workers <= 1 and not (alone and threads > 1):
        for expert in range(experts):
            work(expert)
            done()
        return
    try:
        with ThreadPoolExecutor(max(workers, 1), initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for _ in pool.map(work, range(experts)):
                done()
    finally:
        # The workers' setting is also what threads to come inherit.
        torch.set_num_threads(threads)
