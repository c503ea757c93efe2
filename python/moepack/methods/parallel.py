"""Processes experts in parallel.

Torch splits each operation over its threads and waits for all of them after each operation. For matrices as small as an
expert's, and on a machine with other load, waiting costs more than the work (measured: 15 times slower on two cores
under load). Here, each thread processes whole experts, and each operation runs in one thread.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

MAX_WORKERS = 8
"""Maximum number of experts processed at a time. Each may need 40 MB of temporaries, so this bounds memory for any
number of cores."""


def for_experts(
    work: Callable[[int], None], experts: int, done: Callable[[], None], *, most: int = MAX_WORKERS, alone: bool = False
) -> None:
    """Call `work` with each expert's number, in parallel on as many threads as torch uses.

    Args:
        work: called once per expert, from any thread.
        experts: number of experts.
        done: called in the calling thread after each expert, in order.
        most: maximum number of experts processed at a time; 1 if each needs much memory.
        alone: run every operation in one thread even if there is only one expert, so that sums, and results that depend
            on them, are independent of the number of threads.

    Raises:
        Exception: the exception of the first expert for which `work` failed.
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
        # Later threads would inherit the workers' setting.
        torch.set_num_threads(threads)
