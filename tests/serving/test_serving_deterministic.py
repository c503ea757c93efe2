"""`--deterministic`: the tokens and scores of an answer are the same to the last bit, whoever else is answered."""

import pytest
import torch
from test_serving_engine import Collector

from moepack.integrations.loading import open_model
from moepack.serving.engine import Engine
from moepack.serving.sequence import Wanted
from moepack.serving.text.sampling import Sampling

PROMPTS = [list(range(30 + n, 30 + n + size)) for n, size in enumerate((1, 3, 17, 40, 40, 64, 90, 100))]
TOKENS = 12


@pytest.fixture(scope="module")
def model(packed):
    return open_model(packed, torch.bfloat16)


@pytest.fixture(autouse=True)
def chunks(monkeypatch):
    """Prompts need several chunks, and do not fit a step together."""
    monkeypatch.setattr("moepack.serving.engine.CHUNK", 50)


def ask(engine, ids, seed):
    collector = Collector()
    sampling = Sampling(max_new_tokens=TOKENS, temperature=1.3, seed=seed, ignore_eos=True)
    engine.submit(ids, sampling, collector, Wanted(top=3))
    return collector


def scores(collector):
    collector.text()
    return [score for piece in collector.pieces for score in piece.scores]


def alone(model, tokenizer):
    found = []
    for seed, ids in enumerate(PROMPTS):
        engine = Engine(model, tokenizer, slots=1, deterministic=True).start()
        found.append(scores(ask(engine, ids, seed)))
        engine.close()
    return found


def test_answers_are_those_alone_to_the_last_bit(model, tokenizer):
    expected = alone(model, tokenizer)
    engine = Engine(model, tokenizer, slots=6, deterministic=True)
    for _ in range(2):  # the second time, other caches could have been kept
        collectors = [ask(engine, ids, seed) for seed, ids in enumerate(PROMPTS)]
        if not engine._thread.is_alive():
            engine.start()
        assert [scores(collector) for collector in collectors] == expected
    assert engine.counts()["kept"] == 0
    engine.close()


def test_answers_of_one_prompt_share_its_keys_and_values(model, tokenizer):
    engine = Engine(model, tokenizer, slots=4, deterministic=True)
    collectors = [ask(engine, PROMPTS[6], seed) for seed in (6, 6, 5)]
    engine.start()
    first, same, other = map(scores, collectors)
    assert first == same == alone(model, tokenizer)[6] and other != first
    engine.close()
