"""Decides which experts are in memory, within a budget in bytes.

Threads that compute with experts *hold* them. Held experts are never dropped. Missing experts are read by a thread pool
with several concurrent reads, because a drive needs concurrency to reach its full rate. Two threads that miss the same
expert read it once. To make room, the policy considers the `CANDIDATES` least recently used experts that are not held,
and drops the one with the fewest uses.

Invariants:
- The bytes of resident experts, including those being read, never exceed the budget.
- A thread waits for room only while it holds nothing, so waiting terminates.
- An expert whose read failed is not resident, and the error is raised in every thread that waits for it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Condition

from moepack.stores.streaming.guesses import Guesses
from moepack.stores.streaming.region import Piece, Region

__all__ = ["Expert", "Residency", "Statistics"]

CANDIDATES = 8
"""The number of least recently used experts among which the least used one is dropped."""


@dataclass
class Statistics:
    """Counters of streaming.

    Attributes:
        hits: experts or records that were in memory when needed, counted per layer and call.
        misses: those that were not.
        computed: misses that were not transferred to a GPU but multiplied by the CPU in host memory.
        bytes_read: bytes read from the drive.
        reads: the number of reads.
        waited: seconds that computing threads waited for reads.
        resident: bytes currently in memory.
        most: the peak of `resident`.
        guessed: experts or records predicted to be needed next.
        right: predicted ones that were needed.
        wanted: experts or records needed after a prediction.
        bytes_guessed: speculatively read bytes, included in `bytes_read`.
        bytes_used: speculatively read bytes that were needed before they were dropped; the others were wasted.
        hidden: seconds of speculative reads during which no thread waited for the drive.
    """

    hits: int = 0
    misses: int = 0
    computed: int = 0
    bytes_read: int = 0
    reads: int = 0
    waited: float = 0.0
    resident: int = 0
    most: int = 0
    guessed: int = 0
    right: int = 0
    wanted: int = 0
    bytes_guessed: int = 0
    bytes_used: int = 0
    hidden: float = 0.0

    @property
    def in_vain(self) -> int:
        """Speculatively read bytes that have not been needed so far."""
        return self.bytes_guessed - self.bytes_used


@dataclass(eq=False)
class Expert:
    """An expert of a layer, with its codes in the regions of all projections.

    Attributes:
        regions: the regions of the projections.
        number: the index of the expert.
        nbytes: streamed bytes.
        unused: whether it was read speculatively and has not been needed yet.
    """

    regions: Sequence[Region]
    number: int
    nbytes: int = field(init=False)
    holders: int = 0
    uses: float = 0
    ready: Future[None] | None = None
    unused: bool = False

    def __post_init__(self) -> None:
        self.nbytes = sum(region.sizes[self.number] for region in self.regions)

    def reads(self) -> Iterator[Piece]:
        """The reads that load it; see `Region`."""
        for region in self.regions:
            yield from region.reads(self.number)

    def drop(self) -> None:
        """Release its memory."""
        for region in self.regions:
            region.drop(self.number)


class Residency:
    """Experts in memory.

    Args:
        budget: the most bytes of experts.
        readers: the number of reading threads.
        recent_first: choose the victim among the most recently used experts instead. If the experts of one token do not
            fit, those of later layers are needed next, and those just used are needed last.
    """

    def __init__(self, budget: int, readers: int, *, recent_first: bool = False) -> None:
        self.budget, self._recent_first = budget, recent_first
        self._pool = ThreadPoolExecutor(readers, thread_name_prefix="moepack-read")
        self._changed = Condition()
        self._resident: OrderedDict[Expert, None] = OrderedDict()
        self._held = 0
        self._statistics = Statistics()
        self._guesses = Guesses(self._changed, self._begin)

    @property
    def statistics(self) -> Statistics:
        """A snapshot of the counters."""
        with self._changed:
            return replace(self._statistics, **self._guesses.counts())

    def hold(self, experts: Sequence[Expert], meanwhile: Callable[[], None] | None = None) -> None:
        """Load experts, which must fit into the budget together, and keep them in memory until `release`.

        Args:
            experts: the experts.
            meanwhile: called while reads are in flight, if there are any.

        Raises:
            CorruptionError, LoadError: an expert cannot be read; none is held.
        """
        for _ in self.come(experts, meanwhile):
            pass

    def come(self, experts: Sequence[Expert], meanwhile: Callable[[], None] | None = None) -> Iterator[list[Expert]]:
        """Hold experts like `hold`, and yield them as they arrive, starting with those in memory.

        They are held until `release`. If the iterator ends early, none is held.
        """
        missing, coming = self._claim(experts)
        left, reads = dict(zip(coming, experts, strict=True)), list[Future[None]]()
        try:
            for expert in missing:
                reads += self._read(expert)
            if missing and meanwhile is not None:
                meanwhile()
            while left:
                came = [left.pop(ready) for ready in self._wait(left)]
                if not left:
                    self._demanded()
                yield came
            if not experts:
                self._demanded()
        except BaseException:
            for read in reads:
                read.cancel()
            wait(coming)
            if left:
                self._demanded()
            self.release(experts)
            raise

    def _wait(self, coming: Collection[Future[None]]) -> list[Future[None]]:
        """Wait until at least one of the requested experts has arrived."""
        start = time.perf_counter()
        done = wait(coming, return_when=FIRST_COMPLETED).done
        for ready in done:
            ready.result()
        with self._changed:
            self._statistics.waited += time.perf_counter() - start
        return [ready for ready in coming if ready in done]

    def _demanded(self) -> None:
        """Allow speculative reads again."""
        with self._changed:
            self._guesses.demands -= 1
            self._changed.notify_all()

    def guess(self, experts: Sequence[Expert]) -> None:
        """Read experts that are likely to be needed next, as long as no thread waits for others."""
        with self._changed:
            self._guesses.make(experts, [expert for expert in experts if expert.ready is None])

    def _begin(self, expert: Expert) -> Callable[[], None] | None:
        """Make room for a speculative read of an expert."""
        if self._recent_first or expert.ready is not None or self._held + expert.nbytes > self.budget:
            return None
        self._held, expert.holders, expert.ready, expert.unused = self._held + expert.nbytes, 1, Future(), True
        self._resident[expert] = None
        self._make_room(expert.nbytes)
        return lambda: self._read_ahead(expert)

    def _read_ahead(self, expert: Expert) -> None:
        error: BaseException | None = None
        reads = [*expert.reads()]
        try:
            for source, memory, place in reads:
                source.read(memory, place)
        except BaseException as raised:
            error = raised
        self._settle(expert, error, len(reads), guessed=True)
        self.release([expert])

    def release(self, experts: Sequence[Expert]) -> None:
        """Release held experts, which may then be dropped."""
        with self._changed:
            for expert in experts:
                expert.holders -= 1
                self._held -= 0 if expert.holders else expert.nbytes
            self._changed.notify_all()

    def _claim(self, experts: Sequence[Expert]) -> tuple[list[Expert], list[Future[None]]]:
        """Hold experts and make room for missing ones; return these, and the futures of all experts."""
        with self._changed:
            self._guesses.meet(experts)
            self._guesses.demands += 1
            self._changed.wait_for(lambda: self._held + _unheld(experts) <= self.budget)
            self._held += _unheld(experts)
            missing = [expert for expert in experts if expert.ready is None]
            coming = []
            for expert in experts:
                expert.holders += 1
                expert.uses += 1
                self._statistics.bytes_used += expert.nbytes * expert.unused
                expert.unused = False
                expert.ready = expert.ready or Future()
                coming.append(expert.ready)
                self._resident[expert] = None
                self._resident.move_to_end(expert)
            self._make_room(sum(expert.nbytes for expert in missing))
            self._statistics.hits += len(experts) - len(missing)
            self._statistics.misses += len(missing)
        return missing, coming

    def _make_room(self, coming: int) -> None:
        """Drop experts until `coming` bytes fit."""
        counts = self._statistics
        while counts.resident + coming > self.budget:
            order = reversed(self._resident) if self._recent_first else iter(self._resident)
            free = (expert for expert in order if not expert.holders)
            self._drop(min(islice(free, CANDIDATES), key=lambda expert: expert.uses))
        counts.resident += coming
        counts.most = max(counts.most, counts.resident)

    def _drop(self, expert: Expert) -> None:
        del self._resident[expert]
        expert.ready, expert.uses, expert.unused = None, expert.uses / 2, False
        expert.drop()
        self._statistics.resident -= expert.nbytes

    def _read(self, expert: Expert) -> list[Future[None]]:
        """Start to read an expert."""
        reads = [self._pool.submit(source.read, memory, place) for source, memory, place in expert.reads()]
        left = len(reads)

        def ended(_: Future[None]) -> None:
            nonlocal left
            with self._changed:
                left -= 1
                last = not left
            if last:
                self._settle(expert, _error(reads), len(reads))

        for read in reads:
            read.add_done_callback(ended)
        if not reads:
            self._settle(expert, None, 0)
        return reads

    def _settle(self, expert: Expert, error: BaseException | None, reads: int, guessed: bool = False) -> None:
        """Record the outcome of an expert's reads and notify waiting threads."""
        ready = expert.ready
        assert ready is not None
        with self._changed:
            if error is not None:
                self._drop(expert)
            else:
                self._statistics.reads += reads
                self._statistics.bytes_read += expert.nbytes
                self._statistics.bytes_guessed += expert.nbytes * guessed
        if error is not None:
            ready.set_exception(error)
        else:
            ready.set_result(None)


def _error(reads: Sequence[Future[None]]) -> BaseException | None:
    """The first error of completed reads."""
    errors = [CancelledError() if read.cancelled() else read.exception() for read in reads]
    return next(filter(None, errors), None)


def _unheld(experts: Sequence[Expert]) -> int:
    """Total bytes of the experts that are not held."""
    return sum(expert.nbytes for expert in experts if not expert.holders)
