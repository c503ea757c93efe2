"""A prompt that several sequences wait for is read once."""

import pytest
import torch
from test_serving_engine import Collector

from moepack.decoding.prefix import forked, new_cache
from moepack.serving.engine import Engine
from moepack.serving.sequence import Wanted
from moepack.serving.step import Part, Stepper
from moepack.serving.text.prompts import prompt_ids
from moepack.serving.text.sampling import Sampling
from runtime_support import ARCHITECTURES, SWITCH, tiny_model

PROMPT = "She opened the door and saw that the others had gone on without her"
DRAWN = {"max_new_tokens": 8, "temperature": 1.0}


@pytest.fixture
def engine(model, tokenizer):
    engine = Engine(model, tokenizer, slots=4)
    yield engine
    engine.close()


@pytest.fixture
def read(engine, monkeypatch):
    """The numbers of tokens of the parts that the engine reads."""
    sizes = []
    forward = engine._stepper.forward

    def noted(parts):
        sizes.extend(len(part.ids) for part in parts)
        return forward(parts)

    monkeypatch.setattr(engine._stepper, "forward", noted)
    return sizes


def ask(engine, text=PROMPT, wanted=None, **sampling):
    collector = Collector()
    ids = prompt_ids(engine.tokenizer, text)
    collector.sequence = engine.submit(ids, Sampling(**{**DRAWN, **sampling}), collector, wanted or Wanted())
    return collector


def texts(model, tokenizer, seeds):
    """What each seed gives alone."""
    found = []
    for seed in seeds:
        engine = Engine(model, tokenizer, slots=1)
        collector = ask(engine, seed=seed)
        engine.start()
        found.append(collector.text())
        engine.close()
    return found


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != SWITCH])
def test_a_fork_and_its_origin_continue_independently(architecture):
    model = tiny_model(architecture)
    stepper, cache, prompt = Stepper(model), new_cache(model), list(range(3, 12))
    with torch.inference_mode():
        stepper.forward([Part(prompt, 0, cache)])
        fork = forked(cache)
        for tokens in ((40, 41), (50, 51), (60, 61)):
            for step, (each, token) in enumerate(zip((cache, fork), tokens, strict=True)):
                ids = [*prompt, *[(40, 50, 60)[i] + step for i in range((token - 40) // 10 + 1)]]
                (row,) = stepper.forward([Part([token], len(ids) - 1, each)])
                torch.testing.assert_close(row, model(torch.tensor([ids])).logits[0, -1], rtol=2e-4, atol=2e-4)


def test_several_answers_read_their_prompt_once(engine, model, tokenizer, read):
    collectors = [ask(engine, seed=seed) for seed in range(4)]
    engine.start()
    assert [collector.text() for collector in collectors] == texts(model, tokenizer, range(4))
    assert sum(size for size in read if size > 1) == len(prompt_ids(tokenizer, PROMPT))


def test_more_answers_than_slots_read_their_prompt_once(engine, tokenizer, read):
    collectors = [ask(engine, seed=seed) for seed in range(9)]
    engine.start()
    assert all(collector.text() for collector in collectors)
    assert sum(size for size in read if size > 1) == len(prompt_ids(tokenizer, PROMPT))


def test_a_prompt_is_copied_from_a_running_answer(engine, tokenizer, read):
    first = ask(engine, max_new_tokens=200, ignore_eos=True)
    engine.start()
    while not first.pieces:
        pass
    second = ask(engine, PROMPT + ". Then")
    assert second.text() and not first.ended.is_set()
    assert sum(size for size in read if size > 1) == len(prompt_ids(tokenizer, PROMPT + ". Then"))


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_followers_of_a_lost_sequence_read_the_prompt(engine, model, tokenizer, monkeypatch, how):
    collectors = [ask(engine, seed=seed) for seed in range(3)]
    forward, calls = engine._stepper.forward, []

    def lose(parts):
        calls.append(len(parts))
        if len(calls) == 1 and how == "cancelled":
            engine.cancel(collectors[0].sequence)
            raise ValueError("the pass failed")
        return [ValueError("this part failed")] if len(calls) == 1 else forward(parts)

    monkeypatch.setattr(engine._stepper, "forward", lose)
    engine.start()
    assert [collector.text() for collector in collectors[1:]] == texts(model, tokenizer, (1, 2))
    assert calls[0] == 1


def test_scores_of_a_shared_prompt_are_given_to_each(engine, model, tokenizer, monkeypatch):
    monkeypatch.setattr("moepack.serving.engine.SCORED", 5)
    wanted = Wanted(top=2, scores_prompt=True)
    collectors = [ask(engine, wanted=wanted, seed=seed) for seed in range(3)]
    engine.start()
    scores = [collector.text() and collector.pieces[0].prompt_scores for collector in collectors]
    assert len(scores[0]) == len(prompt_ids(tokenizer, PROMPT)) and scores[1] == scores[2] == scores[0]
