"""Which experts are in memory, within a budget of bytes.

Threads that compute with experts *hold* them: what is held is never dropped, what is missing is read by a pool of
threads, several reads at a time, because the rate of a drive comes from their number. Two threads that miss one expert
read it once. When room is needed, an expert goes that nobody holds: of those whose last use is longest ago
(`CANDIDATES` of them) the one with the fewest uses.

Invariants:
- The bytes of resident experts, those that are being read included, never exceed the budget.
- A thread waits for room only while it holds nothing, so that waiting ends.
- An expert that could not be read is not resident, and the error reaches everyone who waits for it.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from threading import Condition

from moepack.runtime.streaming.guesses import Guesses
from moepack.runtime.streaming.region import Piece, Region

__all__ = ["Expert", "Residency", "Statistics"]

CANDIDATES = 8
"""Experts of which the least used goes."""


@dataclass
class Statistics:
    """What streaming did so far.

    Attributes:
        hits: experts, or records, that were in memory when they were needed, counted at each layer of each call.
        misses: those that were not.
        computed: those of the misses that did not come: the CPU multiplied them, in the host's memory, for a GPU.
        bytes_read: bytes that came from the drive.
        reads: how many reads brought them.
        waited: seconds that computing threads waited for them.
        resident: their bytes in memory now.
        most: the most that they ever were.
        guessed: experts or records that were guessed to be needed next.
        right: those of them that were.
        wanted: experts or records that were needed after a guess.
        bytes_guessed: bytes that were read on a guess, among those read.
        bytes_used: those of them that were needed before they were dropped; the others were read in vain.
        hidden: seconds in which guesses were read and nobody waited for the drive.
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
        """Bytes that were read on a guess and not needed, so far."""
        return self.bytes_guessed - self.bytes_used


@dataclass(eq=False)
class Expert:
    """An expert of a layer: its codes in the regions of all projections.

    Attributes:
        regions: those of the projections.
        number: which expert it is.
        nbytes: bytes that come and go.
        unused: whether it was read on a guess and nobody has needed it yet.
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
        """The reads that bring it, as those of `Region`."""
        for region in self.regions:
            yield from region.reads(self.number)

    def drop(self) -> None:
        """Give its memory back."""
        for region in self.regions:
            region.drop(self.number)


class Residency:
    """Experts in memory.

    Args:
        budget: the most bytes that they may take.
        readers: threads that read.
        recent_first: look for the expert that goes among those of the latest use instead. Where the experts of one
            token do not fit, those of the layers behind are used next, and those just used last.
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
        """What happened so far."""
        with self._changed:
            return replace(self._statistics, **self._guesses.counts())

    def hold(self, experts: Sequence[Expert], meanwhile: Callable[[], None] | None = None) -> None:
        """Have experts in memory, together at most as large as the budget, until `release`.

        Args:
            experts: which.
            meanwhile: is called while reads are under way, if any are.

        Raises:
            CorruptionError, LoadError: one cannot be read; none is held.
        """
        for _ in self.come(experts, meanwhile):
            pass

    def come(self, experts: Sequence[Expert], meanwhile: Callable[[], None] | None = None) -> Iterator[list[Expert]]:
        """Hold experts, as `hold` does, and give them as they come: those first that are there.

        They are held until `release`; where the iterator ends before it has given all, none is.
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
        """Wait until some have come that somebody waits for."""
        start = time.perf_counter()
        done = wait(coming, return_when=FIRST_COMPLETED).done
        for ready in done:
            ready.result()
        with self._changed:
            self._statistics.waited += time.perf_counter() - start
        return [ready for ready in coming if ready in done]

    def _demanded(self) -> None:
        """Let guesses be read again."""
        with self._changed:
            self._guesses.demands -= 1
            self._changed.notify_all()

    def guess(self, experts: Sequence[Expert]) -> None:
        """Read experts that are likely to be needed next, as long as nobody waits for others."""
        with self._changed:
            self._guesses.make(experts, [expert for expert in experts if expert.ready is None])

    def _begin(self, expert: Expert) -> Callable[[], None] | None:
        """Make room for an expert that is read on a guess."""
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
        """Let experts that were held go when room is needed."""
        with self._changed:
            for expert in experts:
                expert.holders -= 1
                self._held -= 0 if expert.holders else expert.nbytes
            self._changed.notify_all()

    def _claim(self, experts: Sequence[Expert]) -> tuple[list[Expert], list[Future[None]]]:
        """Hold experts and make room for those that are missing; returns these, and what says that all are there."""
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
        """Begin to read an expert."""
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
        """Say to everyone who waits for an expert how its reads ended."""
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
    """What went wrong with reads that have ended."""
    errors = [CancelledError() if read.cancelled() else read.exception() for read in reads]
    return next(filter(None, errors), None)


def _unheld(experts: Sequence[Expert]) -> int:
    """Bytes of the experts that nobody holds."""
    return sum(expert.nbytes for expert in experts if not expert.holders)
