"""What the engine writes reaches the event loop in order, with one wake per step."""

import asyncio
import threading

from moepack.serving.http.handover import Handover


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
