"""The engine that steps many sequences together: results, admission, and released resources."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from transformers import MixtralForCausalLM

from moepack.decoding.prefix import new_cache
from moepack.errors import LoadError
from moepack.serving import engine as engines
from moepack.serving import sequence
from moepack.serving.engine import CHUNK, ClosedError, Engine, QueueFullError
from moepack.serving.pace import AGAIN, Pace
from moepack.serving.step import Part, Stepper
from moepack.serving.text.generation import generate
from moepack.serving.text.prompts import prompt_ids
from moepack.serving.text.sampling import Sampling
from runtime_support import ARCHITECTURES, SWITCH, tiny_model

PROMPTS = ("The sea", "a wolf and a fire", "x", "She opened the door and saw that the others had gone on without her")


class Collector:
    """A client's view of its sequence."""

    def __init__(self):
        self.pieces, self.ended = [], threading.Event()

    def __call__(self, piece):
        assert not self.ended.is_set(), "a piece behind the last"
        self.pieces.append(piece)
        if piece.finish is not None:
            self.ended.set()

    def text(self, seconds=60):
        assert self.ended.wait(seconds), self.pieces
        return "".join(piece.text for piece in self.pieces)

    @property
    def finish(self):
        return self.pieces[-1].finish


@pytest.fixture
def engine(model, tokenizer):
    engine = Engine(model, tokenizer, slots=8)
    yield engine
    engine.close()


def ask(engine, text, collector=None, **sampling):
    collector = collector or Collector()
    collector.sequence = engine.submit(prompt_ids(engine.tokenizer, text), Sampling(**sampling), collector)
    return collector


def steps(model, texts, sizes):
    """Let a model read texts together, a number of tokens of each per step; return its logits and the expected ones."""
    stepper, caches = Stepper(model), [new_cache(model) for _ in texts]
    assert stepper.together
    stepper.pace.note(False, 1, 1e9)
    for size in sizes:
        parts = []
        for ids, cache in zip(texts, caches, strict=True):
            read = cache.get_seq_length()
            if read < len(ids):
                parts.append((ids[: read + size], Part(ids[read : read + size], read, cache)))
        rows = stepper.forward([part for _, part in parts])
        yield from ((row, model(torch.tensor([ids])).logits[0, -1]) for (ids, _), row in zip(parts, rows, strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != SWITCH])
def test_a_step_of_many_is_the_steps_of_each(architecture, attention):
    """Prompts of different lengths in several parts, then single tokens: the logits equal those of one pass each."""
    model = tiny_model(architecture)
    model.config._attn_implementation = attention
    texts = [list(range(first, first + count)) for first, count in ((3, 5), (8, 9), (30, 1), (40, 14))]
    with torch.inference_mode():
        for row, whole in steps(model, texts, (6, 4, 2, 1, 1)):
            torch.testing.assert_close(row, whole, rtol=2e-4, atol=2e-4)
    assert model.config._attn_implementation == attention


def test_windows_of_attention_are_kept():
    config = tiny_model("mixtral").config
    config.sliding_window = 4
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).eval()
    with torch.inference_mode():
        for row, whole in steps(model, [list(range(3, 15)), list(range(20, 28))], (5, 2, 1, 1)):
            torch.testing.assert_close(row, whole, rtol=2e-4, atol=2e-4)


def test_the_faster_way_is_taken_and_the_other_tried_again():
    pace = Pace()
    assert not pace.is_together(8)  # single steps are not observable
    pace.note(False, 8, 8.0)
    assert pace.is_together(8)
    pace.note(True, 8, 4.0)
    assert pace.is_together(8)
    pace.note(True, 8, 40.0)
    ways = [pace.is_together(8) for _ in range(2 * AGAIN)]
    assert ways.count(True) == 2
    assert pace.is_together(9)


def test_many_at_a_time_read_the_same_as_alone(engine, model, tokenizer):
    expected = [generate(model, tokenizer, text, Sampling(max_new_tokens=12)).text for text in PROMPTS]
    collectors = [ask(engine, text, max_new_tokens=12) for text in PROMPTS]
    engine.start()
    assert [collector.text() for collector in collectors] == expected
    assert {collector.finish for collector in collectors} <= {"length", "stop"}
    assert [collector.pieces[-1].tokens for collector in collectors] == [12] * 4


def test_a_single_sequence_uses_the_core_s_decoding_step(engine, model):
    before = model.model.forward.steps
    collector = ask(engine, "The sea", max_new_tokens=6)
    engine.start()
    assert collector.text() and model.model.forward.steps == before + 5


def test_random_numbers_are_each_sequence_s_own(engine):
    settings = {"max_new_tokens": 12, "temperature": 1.0}
    collectors = [ask(engine, "The sea", seed=seed, **settings) for seed in (1, 1, 2)]
    engine.start()
    first, same, other = (collector.text() for collector in collectors)
    assert first == same != other


def test_sequences_take_turns_of_the_slots(model, tokenizer):
    engine = Engine(model, tokenizer, slots=2)
    collectors = [ask(engine, text, max_new_tokens=3) for text in PROMPTS * 5]
    engine.start()
    texts = [collector.text() for collector in collectors]
    assert texts == texts[:4] * 5
    engine.close()
    assert engine.counts() == {"active": 0, "waiting": 0, "kept": 0}


def test_the_queue_accepts_its_capacity_of_ten_thousand_requests(model, tokenizer):
    engine = Engine(model, tokenizer, slots=64, queue=100)
    taken, refused = [], 0
    for _ in range(10_000):
        try:
            taken.append(ask(engine, "x", max_new_tokens=1))
        except QueueFullError:
            refused += 1
    assert (len(taken), refused) == (100, 9_900)
    engine.start()
    assert len({collector.text() for collector in taken}) == 1
    engine.close()


def test_an_abandoned_answer_frees_its_slot(model, tokenizer):
    engine = Engine(model, tokenizer, slots=1).start()
    gone = ask(engine, "The sea", max_new_tokens=2000)
    while not gone.pieces:
        time.sleep(0.01)
    waiting, never = ask(engine, "x", max_new_tokens=1), ask(engine, "y", max_new_tokens=1)
    engine.cancel(never.sequence)
    engine.cancel(gone.sequence)
    assert waiting.text() and waiting.finish == "length"
    assert not gone.ended.is_set() and not never.pieces
    engine.close()


def test_late_answers_end(model, tokenizer, monkeypatch):
    """The time passes with the first piece, when one answer runs and another waits."""

    class Late(Collector):
        def __call__(self, piece):
            clock.now = 1.0
            super().__call__(piece)

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(sequence, "time", clock)
    engine = Engine(model, tokenizer, slots=1, seconds=0.5)
    long = ask(engine, "The sea", Late(), max_new_tokens=2000)
    waiting = ask(engine, "x", max_new_tokens=1)
    engine.start()
    assert long.text() and long.finish == "length" and long.pieces[-1].tokens < 2000
    waiting.text()
    assert (waiting.finish, waiting.pieces[-1].error) == ("error", "the server was too busy to answer in time")
    engine.close()


def test_closing_ends_every_answer(model, tokenizer):
    engine = Engine(model, tokenizer, slots=1).start()
    collectors = [ask(engine, "The sea", max_new_tokens=2000) for _ in range(3)]
    engine.close()
    assert {collector.pieces[-1].error for collector in collectors} == {"the server is shutting down"}
    with pytest.raises(ClosedError, match="is shutting down"):
        ask(engine, "x")


def test_closing_with_patience_lets_answers_end(model, tokenizer):
    engine = Engine(model, tokenizer, slots=1).start()
    answered, waiting = ask(engine, "The sea", max_new_tokens=30), ask(engine, "x")
    while not answered.pieces:
        time.sleep(0.005)
    engine.close(patience=60)
    assert (answered.finish, answered.pieces[-1].tokens, waiting.finish) == ("length", 30, "error")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_requests_end_if_the_engine_fails(engine, monkeypatch):
    monkeypatch.setattr(engine, "_leave", lambda: 1 / 0)
    left = [ask(engine, "The sea") for _ in range(20)]
    engine.start()
    assert {collector.text() or collector.pieces[-1].error for collector in left} == {"the server is shutting down"}
    assert not engine.is_open


def test_a_failing_model_fails_its_answers_and_the_engine_continues(engine, monkeypatch):
    engine.start()
    with monkeypatch.context() as patch:
        patch.setattr(type(engine.model), "forward", lambda *args, **kwargs: 1 / 0)
        failed = ask(engine, "The sea")
        failed.text()
    assert (failed.finish, failed.pieces[-1].error) == ("error", "the model failed: ZeroDivisionError")
    assert ask(engine, "The sea", max_new_tokens=2).text()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_gpu_that_disappears_closes_the_engine(engine, monkeypatch):
    def forward(*_, **__):
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(type(engine.model), "forward", forward)
    left = [ask(engine, "The sea") for _ in range(3)]
    engine.start()
    errors = {collector.text() or collector.pieces[-1].error for collector in left}
    assert errors <= {"the model failed: AcceleratorError", "the server is shutting down"} and not engine.is_open


def test_the_next_turn_reads_only_new_tokens(engine, model, monkeypatch):
    engine.start()
    first = ask(engine, PROMPTS[3], max_new_tokens=8)
    text = PROMPTS[3] + first.text() + " and"
    read, original = [], Stepper.forward

    def counted(stepper, parts):
        read.extend(len(part.ids) for part in parts)
        return original(stepper, parts)

    monkeypatch.setattr(Stepper, "forward", counted)
    second = ask(engine, text, max_new_tokens=4)
    expected = generate(model, engine.tokenizer, text, Sampling(max_new_tokens=4)).text
    assert second.text() == expected
    assert read[0] < 20 < len(prompt_ids(engine.tokenizer, text))


def test_long_prompts_are_read_in_chunks_between_the_tokens_of_others(engine, model):
    text = "ab " * (CHUNK // 2)
    long, short = ask(engine, text, max_new_tokens=2), ask(engine, "x", max_new_tokens=6)
    engine.start()
    assert short.text() and long.text() == generate(model, engine.tokenizer, text, Sampling(max_new_tokens=2)).text


@pytest.fixture
def sizes(engine, monkeypatch):
    """The sizes of the parts of each step. Chunks have 8 tokens, bursts up to 32."""
    found, original = [], Stepper.forward
    monkeypatch.setattr(engines, "CHUNK", 8)
    monkeypatch.setattr(engines, "BURST", 32)

    def forward(stepper, parts):
        found.append([len(part.ids) for part in parts])
        return original(stepper, parts)

    monkeypatch.setattr(Stepper, "forward", forward)
    return found


def beside_an_answer(engine, sizes, asks):
    """Run an answer; `asks` submits prompts at its first piece, in the engine's thread. The steps from then on."""
    start = []

    class Running(Collector):
        def __call__(self, piece):
            if not start:
                start.append(len(sizes))
                asks()
            super().__call__(piece)

    engine.submit([3], Sampling(max_new_tokens=30, ignore_eos=True), running := Running())
    engine.start()
    running.text()
    assert running.pieces[-1].tokens == 30
    return sizes[start[0] :]


def submit(engine, first, length, collector):
    engine.submit([first] + [5] * (length - 1), Sampling(max_new_tokens=1), collector)


def test_a_burst_of_prompts_is_read_before_answers_go_on(engine, sizes):
    lengths = (4, 6, 5, 8, 3, 4)
    found = beside_an_answer(
        engine, sizes, lambda: [submit(engine, 6 + i, length, Collector()) for i, length in enumerate(lengths)]
    )
    assert found[:5] == [[4, 4], [2, 5, 1], [7, 1], [1, 2, 4], [1]]


def test_answers_never_wait_longer_than_for_a_burst(engine, sizes):
    numbers = iter(range(6, 40))

    def ask(*_):  # each read prompt is followed by two others
        for number in (next(numbers, None), next(numbers, None)):
            if number is not None:
                submit(engine, number, 7, Again())

    class Again(Collector):
        def __call__(self, piece):
            super().__call__(piece)
            ask()

    found = beside_an_answer(engine, sizes, lambda: [ask(), ask()])
    answered = [step[0] == 1 for step in found]
    assert not all(answered[:20])
    assert all(any(answered[i : i + 4]) for i in range(len(answered) - 3))


@pytest.mark.parametrize("lengths", [(4, 6, 5, 8, 3, 4), (12, 3, 9, 7, 11, 5, 6)], ids=["burst", "more than a burst"])
def test_the_last_of_many_prompts_waits_only_for_full_chunks(engine, sizes, lengths):
    """Beside a running answer, prompts of `n` tokens are read in the fewest steps of 8 tokens."""
    found = beside_an_answer(
        engine, sizes, lambda: [submit(engine, 6 + i, length, Collector()) for i, length in enumerate(lengths)]
    )
    fewest = -(-sum(lengths) // 8)
    answered = sum(1 for step in found[:fewest] if step[0] == 1)
    assert sum(map(sum, found[:fewest])) - answered >= sum(lengths) - 1


def test_the_pieces_of_a_step_are_announced_together(engine, sizes):
    events = []

    class Noted(Collector):
        def __call__(self, piece):
            events.append("piece")
            super().__call__(piece)

    engine.on_step = lambda: events.append("step")
    collectors = [Noted() for _ in range(4)]
    for first, collector in enumerate(collectors, 6):
        engine.submit([first, 5], Sampling(max_new_tokens=6, ignore_eos=True), collector)
    engine.start()
    for collector in collectors:
        collector.text()
    engine.close()
    assert events[-1] == "step" and events.count("piece") == sum(len(each.pieces) for each in collectors)
    runs = "".join(event[0] for event in events).split("s")
    assert len([run for run in runs if run]) <= len(sizes)


@pytest.mark.parametrize("length", [17, 33])
def test_a_single_prompt_is_no_burst(engine, sizes, length):
    found = beside_an_answer(engine, sizes, lambda: submit(engine, 6, length, Collector()))
    assert found[: length // 8 + 2] == [*[[1, 8]] * (length // 8), [1, 1], [1]]


def test_an_encoder_decoder_is_refused(tokenizer):
    with pytest.raises(LoadError, match="only decoder models can be served"):
        Engine(tiny_model(SWITCH), tokenizer)
