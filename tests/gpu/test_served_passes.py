"""The engine on recorded passes, with the stand-ins of test_passes.py."""

import threading

import pytest
import torch
from test_passes import InRooms, Recorded

from moepack.decoding import layers
from moepack.decoding.decoder import decoder_of
from moepack.decoding.passes import Passes
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving import step
from moepack.serving.engine import Engine
from moepack.serving.text.prompts import prompt_ids
from moepack.serving.text.sampling import Sampler, Sampling

TEXTS = ("The sea", "a wolf and a fire", "x", "She opened the door and saw that the others had gone on without her" * 3)


@pytest.fixture(scope="module")
def model(packed):
    return open_model(packed, "float32", mode="exact")


@pytest.fixture(scope="module")
def tokenizer(packed):
    return open_tokenizer(packed)


@pytest.fixture
def flights(model, monkeypatch):
    """Gives the engine passes, and counts the steps that begin before the results of the last one are read."""

    def passes_of(model):
        tape, decoder = Recorded(), decoder_of(model)
        tape.replacements = layers.Replacements(decoder, InRooms())
        return Passes(decoder, type(decoder).forward.__get__(decoder), tape.replacements, model.lm_head, tape)

    begun, own = [], step.Stepper.follow

    def follow(stepper, flight):
        begun.append(own(stepper, flight))
        return begun[-1]

    monkeypatch.setattr(step, "passes_of", passes_of)
    monkeypatch.setattr(step.Stepper, "follow", follow)
    return begun


def test_passes_are_recorded_before_the_first_request(model, tokenizer, flights):
    engine = Engine(model, tokenizer, slots=3, context=40)
    passes = engine._stepper._passes
    assert set(passes._made) == {(size, False, False, draws) for size in (1, 2, 4) for draws in (False, True)} | {
        (64, True, False, False),
        (128, True, False, False),
    }
    recorded = passes._recorder.recorded
    engine.start()
    try:
        assert Answer(engine, TEXTS[0], max_new_tokens=5).text()
        assert passes._recorder.recorded == recorded
    finally:
        engine.close()


def test_too_little_memory_for_a_pass_leaves_the_others(model, tokenizer, flights, monkeypatch):
    own = Recorded.__call__

    def record(tape, function, device):
        if tape.recorded == 4:
            tape.recorded += 1
            raise torch.OutOfMemoryError("a pass")
        return own(tape, function, device)

    monkeypatch.setattr(Recorded, "__call__", record)
    engine = Engine(model, tokenizer, slots=3, context=40).start()
    try:
        assert Answer(engine, TEXTS[0], max_new_tokens=5).text() == alone(model, tokenizer, TEXTS[0], max_new_tokens=5)
        assert len(engine._stepper._passes._made) >= 4
    finally:
        engine.close()


class Answer:
    def __init__(self, engine, text, **sampling):
        self.pieces, self.ended = [], threading.Event()
        self.sequence = engine.submit(prompt_ids(engine.tokenizer, text), Sampling(**sampling), self)

    def __call__(self, piece):
        self.pieces.append(piece)
        if piece.finish is not None:
            self.ended.set()

    def text(self):
        assert self.ended.wait(60)
        return "".join(piece.text for piece in self.pieces)


def alone(model, tokenizer, text, **sampling):
    """The answer of an engine without passes, which runs the model's own forward."""
    engine = Engine(model, tokenizer, deterministic=True).start()
    try:
        return Answer(engine, text, **sampling).text()
    finally:
        engine.close()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_the_model(model, tokenizer, flights, temperature):
    settings = [{"temperature": temperature, "seed": n, "max_new_tokens": 5 + 9 * n} for n in range(len(TEXTS))]
    expected = [alone(model, tokenizer, *pair[:1], **pair[1]) for pair in zip(TEXTS, settings, strict=True)]
    engine = Engine(model, tokenizer, slots=3).start()
    try:
        answers = [Answer(engine, text, **own) for text, own in zip(TEXTS, settings, strict=True)]
        assert [answer.text() for answer in answers] == expected
        # Their keys and values serve later prompts.
        again = [Answer(engine, text, **own) for text, own in zip(TEXTS[1:], settings[1:], strict=True)]
        assert [answer.text() for answer in again] == expected[1:]
        assert again[-1].pieces[-1].cached > 20
    finally:
        engine.close()
    assert any(flight is not None for flight in flights)


def test_cancelled_answers_leave_a_step_that_runs(model, tokenizer, flights):
    expected = alone(model, tokenizer, TEXTS[0], max_new_tokens=60)
    engine = Engine(model, tokenizer, slots=3).start()
    try:
        other, answer = (Answer(engine, text, max_new_tokens=60) for text in (TEXTS[1], TEXTS[0]))
        while len(other.pieces) < 3:
            assert not other.ended.wait(0.01)
        engine.cancel(other.sequence)
        assert answer.text() == expected
    finally:
        engine.close()


def test_the_device_draws_every_token(model, tokenizer, flights, monkeypatch):
    settings = [{"temperature": 0.8, "top_p": 0.9, "seed": n, "max_new_tokens": 6} for n in range(2)]
    expected = [alone(model, tokenizer, text, **own) for text, own in zip(TEXTS, settings, strict=False)]
    monkeypatch.setattr(Sampler, "choose", None)
    engine = Engine(model, tokenizer, slots=2).start()
    try:
        answers = [Answer(engine, text, **own) for text, own in zip(TEXTS, settings, strict=False)]
        assert [answer.text() for answer in answers] == expected
    finally:
        engine.close()


@pytest.mark.parametrize("temperatures", [(0.8, 0.8, 0.0), (0.0, 0.8, 0.8)])
def test_answers_to_one_prompt_draw_their_own_tokens(model, tokenizer, flights, temperatures):
    settings = [{"temperature": each, "seed": n, "max_new_tokens": 6} for n, each in enumerate(temperatures)]
    expected = [alone(model, tokenizer, TEXTS[3], **own) for own in settings]
    assert len(set(expected)) == 3
    engine = Engine(model, tokenizer, slots=3)
    answers = [Answer(engine, TEXTS[3], **own) for own in settings]
    engine.start()
    try:
        assert [answer.text() for answer in answers] == expected
    finally:
        engine.close()
