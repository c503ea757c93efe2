"""What the engine writes reaches the event loop in order, with one wake per step."""

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

from moepack.serving.http.handover import Handover, Handovers
from moepack.serving.http.server import Settings, create_app
from request_support import COMPLETIONS, call, completion


class Loop:
    """An event loop that counts its wakes; `turn` runs what was scheduled."""

    def __init__(self):
        self.scheduled, self.wakes = [], 0

    def call_soon_threadsafe(self, call):
        self.wakes += 1
        self.scheduled.append(call)

    def turn(self):
        while self.scheduled:
            self.scheduled.pop(0)()


def test_many_calls_wake_the_loop_once():
    loop, found = Loop(), []
    handover = Handover(loop)
    handover.wake()
    for number in range(64):
        handover.add(found.append, number)
    assert (loop.wakes, found) == (0, [])
    handover.wake()
    loop.turn()
    handover.wake()
    assert (loop.wakes, found) == (1, [*range(64)])


def test_no_call_of_another_thread_is_lost():
    found = []

    async def receive():
        handover, ended = Handover(asyncio.get_running_loop()), asyncio.Event()

        def write():
            for number in range(2000):
                handover.add(found.append, number)
                handover.wake()
            handover.add(ended.set)
            handover.wake()

        writer = threading.Thread(target=write)
        writer.start()
        await asyncio.wait_for(ended.wait(), 60)
        writer.join()

    asyncio.run(receive())
    assert found == [*range(2000)]


def test_a_loop_that_has_ended_is_no_failure():
    loop = asyncio.new_event_loop()
    loop.close()
    handover = Handover(loop)
    handover.add(print)
    handover.wake()


def test_loops_and_applications_share_an_engine(engine):
    """A request does not take the wakes of another one."""

    async def asked(app, tokens):
        body = json.dumps(completion(max_tokens=tokens, ignore_eos=True)).encode()
        kind = (("Content-Type", "application/json"),)
        _, _, answer = await asyncio.wait_for(call(app, "POST", COMPLETIONS, body, kind), 60)
        return answer["usage"]["completion_tokens"]

    async def together():
        return await asyncio.gather(*(asked(create_app(engine, Settings("tiny")), tokens) for tokens in (60, 5)))

    assert asyncio.run(together()) == [60, 5]
    app, lengths = create_app(engine, Settings("tiny")), (60, 30, 5)
    with ThreadPoolExecutor(len(lengths)) as pool:
        assert [*pool.map(lambda tokens: asyncio.run(asked(app, tokens)), lengths)] == [*lengths]


def test_handovers_of_closed_loops_are_dropped():
    handovers = Handovers()

    async def here():
        handover = handovers.here()
        assert handovers.here() is handover
        return handover

    first, second = asyncio.run(here()), asyncio.run(here())
    assert first is not second and [*handovers._each.values()] == [second]
