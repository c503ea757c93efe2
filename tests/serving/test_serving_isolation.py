"""A sequence that fails in the model or runs out of memory does not change the tokens of other sequences."""

import copy
import threading
from itertools import chain

import pytest
import torch
from tokenizers import Regex, decoders
from transformers import DynamicCache, MixtralForCausalLM

from moepack.decoding.cache import Mark
from moepack.decoding.prefix import new_cache
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.engine import Engine
from moepack.serving.isolation import Part, isolated
from moepack.serving.step import Stepper
from moepack.serving.text.detokenizer import Detokenizer
from moepack.serving.text.sampling import Sampling
from runtime_support import tiny_model

POISON = 60


def poisoned(model, token=POISON):
    """Let a model raise for a token in the middle of its last layer, after attention has appended keys and values."""
    seen = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)

    def fail(*_):
        if bool((seen[-1] == token).any()):
            raise ZeroDivisionError("in the middle of a layer")

    model.model.layers[-1].post_attention_layernorm.register_forward_pre_hook(fail)
    return model


def windowed(model):
    config = model.config
    config.sliding_window = 4
    torch.manual_seed(0)
    return MixtralForCausalLM(config).eval()


@pytest.fixture(params=["whole", "window"])
def model(request):
    model = tiny_model("mixtral")
    return windowed(model) if request.param == "window" else model


def read(stepper, caches, texts, first, last):
    parts = [Part(ids[first:last], first, cache) for ids, cache in zip(texts, caches, strict=True)]
    return stepper.forward(parts)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("culprits", [{0}, {3}, {5}, {1, 2}, {0, 2, 5}, {0, 1, 2, 3, 4, 5}])
def test_other_sequences_read_the_same_tokens(model, together, culprits):
    """A prompt, then a step with the culprits' tokens in it, then one more: logits are those of each sequence alone."""
    texts = [[token + 17 * round for token in (3 + i, 20, 9 + i, 7, 5)] for i, round in enumerate([0, 1, 0, 1, 0, 1])]
    for number in culprits:
        texts[number][3] = POISON
    whole = [model(torch.tensor([ids])).logits[0] for ids in texts]
    poisoned(model)
    stepper = Stepper(model)
    stepper.pace.note(False, 1, 1e9 if together else 0.0)
    caches = [new_cache(model) for _ in texts]
    with torch.inference_mode():
        read(stepper, caches, texts, 0, 3)
        before = [[(layer.keys.clone(), layer.values.clone()) for layer in cache.layers] for cache in caches]
        outcomes = read(stepper, caches, texts, 3, 4)
        for number, outcome in enumerate(outcomes):
            if number in culprits:
                assert isinstance(outcome, ZeroDivisionError)
                assert caches[number].get_seq_length() == 3
                for (keys, values), layer in zip(before[number], caches[number].layers, strict=True):
                    assert torch.equal(layer.keys, keys) and torch.equal(layer.values, values)
            else:
                torch.testing.assert_close(outcome, whole[number][3], rtol=2e-4, atol=2e-4)
        left = [number for number in range(6) if number not in culprits]
        if left:
            rest = [[texts[number] for number in left], [caches[number] for number in left]]
            for number, row in zip(left, read(stepper, rest[1], rest[0], 4, 5), strict=True):
                torch.testing.assert_close(row, whole[number][4], rtol=2e-4, atol=2e-4)


def test_a_mark_restores_the_cache(model):
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9]])
    with torch.inference_mode():
        cache = new_cache(model)
        model(ids[:, :5], past_key_values=cache)
        mark, expected = Mark(cache), model(ids).logits[:, 5:]
        assert mark.is_exact
        for size in (2, 1):
            model(ids[:, 2 : 2 + size], past_key_values=cache)
            mark.restore()
        torch.testing.assert_close(model(ids[:, 5:], past_key_values=cache).logits, expected, rtol=1e-4, atol=1e-4)


class Hungry:
    """Reads parts of at most a number of tokens; more raise an out-of-memory error."""

    def __init__(self, most):
        self.most, self.sizes = most, []

    def __call__(self, parts):
        size = sum(len(part.ids) for part in parts)
        self.sizes.append(size)
        if size > self.most:
            raise torch.OutOfMemoryError("out of memory")
        for part in parts:
            assert part.position == len(part.cache.read)
            part.cache.read += part.ids
        return [torch.tensor(part.cache.read[-1]) for part in parts]


def empty_cache():
    """A cache that records tokens."""
    cache = DynamicCache()
    cache.read = []
    return cache


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 100])
def test_steps_without_enough_memory_are_halved(most):
    texts = [list(range(count)) for count in (1, 7, 2, 1, 4)]
    parts = [Part(ids, 0, empty_cache()) for ids in texts]
    reader = Hungry(most)
    found = isolated(reader, parts)
    assert [int(row) for row in found] == [ids[-1] for ids in texts]
    assert [part.cache.read for part in parts] == texts
    assert max(reader.sizes[1:], default=0) <= 15


def test_memory_that_is_not_needed_is_given_up_first():
    reader, given_up = Hungry(4), []

    def relieve():
        given_up.append(not given_up)
        reader.most = 8
        return given_up[-1]

    parts = [Part([1, 2, 3], 0, empty_cache()), Part([4, 5, 6], 0, empty_cache())]
    assert [int(row) for row in isolated(reader, parts, relieve)] == [3, 6]
    assert reader.sizes == [6, 6]


def test_a_single_token_without_memory_fails():
    (found,) = isolated(Hungry(0), [Part([1], 0, empty_cache())])
    assert isinstance(found, torch.OutOfMemoryError) and found.__traceback__ is None


class Client:
    """A client's view of its sequence."""

    def __init__(self, engine, ids, **sampling):
        self.pieces, self.ended = [], threading.Event()
        self.sequence = engine.submit(ids, Sampling(**sampling), self)

    def __call__(self, piece):
        assert not self.ended.is_set(), "a piece behind the last"
        self.pieces.append(piece)
        if piece.finish is not None:
            self.ended.set()

    def ends(self):
        assert self.ended.wait(60), self.pieces
        return self.pieces[-1].finish, "".join(piece.text for piece in self.pieces)


@pytest.fixture
def loaded(packed):
    return open_model(packed, "float32", mode="exact")


@pytest.fixture(scope="module")
def tokenizer(packed):
    return open_tokenizer(packed)


def written(model, ids, count):
    """The tokens that a model generates for one sequence alone."""
    with torch.inference_mode():
        return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


@pytest.mark.parametrize("late", [False, True])
def test_a_failing_sequence_ends_alone(model, tokenizer, late):
    """Some answers fail, at their prompt or at a generated token. The others are not affected."""
    model.generation_config.eos_token_id = None
    asked = [[3, 9, 4, 11], [5, 6, 22, 23], [30, 31, 32, 33], [8, 19, 50, 7], [40, 41, 42]]
    answers = [written(model, ids, 12) for ids in asked]
    readings = [ids + answer[:-1] for ids, answer in zip(asked, answers, strict=True)]
    tokens = {token for answer in answers for token in answer[2:-1]} - {*chain(*asked)} if late else asked[3]
    token = min(tokens, key=lambda token: sum(token in ids for ids in readings))
    failing = {number for number, ids in enumerate(readings) if token in ids}
    assert 0 < len(failing) < 5
    engine = Engine(model, tokenizer)
    engine.ends = frozenset()
    poisoned(model, token)
    engine._stepper.pace.note(False, 1, 1e9)
    clients = [Client(engine, ids, max_new_tokens=12) for ids in asked]
    engine.start()
    finishes = [client.ends()[0] for client in clients]
    assert [finish == "error" for finish in finishes] == [number in failing for number in range(5)]
    for number, client in enumerate(clients):
        if number in failing:
            assert client.pieces[-1].error == "the model failed: ZeroDivisionError"
        else:
            assert client.sequence.ids == asked[number] + answers[number]
    assert engine.is_open
    engine.close()


@pytest.mark.parametrize("place", ["_cache", "_keep"])
def test_failures_beside_the_model_end_one_answer_at_most(loaded, tokenizer, monkeypatch, place):
    engine = Engine(loaded, tokenizer)
    original, calls = getattr(engine, place), []

    def fail(*arguments):
        calls.append(arguments)
        return 1 / 0 if len(calls) == 2 else original(*arguments)

    monkeypatch.setattr(engine, place, fail)
    clients = [Client(engine, [5 + i, 30], max_new_tokens=4) for i in range(4)]
    engine.start()
    finishes = [client.ends()[0] for client in clients]
    assert finishes.count("error") == (1 if place == "_cache" else 0) and finishes.count("length") >= 3
    assert engine.is_open
    engine.close()


class Panic(BaseException):
    """The exception of a Rust panic in Python."""


def test_a_panic_of_the_model_ends_one_answer(model, tokenizer):
    model.generation_config.eos_token_id = None
    expected = written(model, [5, 6, 22], 6)

    def fail(_, given):
        if bool((given[0] == POISON).any()):
            raise Panic("index out of bounds")

    model.model.embed_tokens.register_forward_pre_hook(fail)
    engine = Engine(model, tokenizer)
    engine.ends = frozenset()
    bad, good = Client(engine, [3, POISON], max_new_tokens=6), Client(engine, [5, 6, 22], max_new_tokens=6)
    engine.start()
    assert bad.ends()[0] == "error" and good.ends()[0] == "length" and good.sequence.ids[3:] == expected
    assert engine.is_open
    engine.close()


def test_a_panic_of_the_decoder_ends_one_answer(loaded, tokenizer):
    """The decoder of tokenizers panics if it strips more characters than a token has."""
    engine = Engine(loaded, tokenizer)
    first, other = (Client(engine, [5, token], max_new_tokens=6) for token in (40, 41))
    broken = copy.deepcopy(tokenizer)
    broken.backend_tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(Regex(".*"), "~"), decoders.Strip("~", 0, 3)]
    )
    first.sequence._stream._detokenizer = Detokenizer(broken)
    engine.start()
    assert first.ends()[0] == "error" and other.ends()[0] == "length" and engine.is_open
    assert first.pieces[-1].error.startswith("the tokenizer cannot write the text of its tokens: PanicException")
    engine.close()


def test_a_text_that_cannot_be_decoded_ends_alone(loaded, tokenizer, monkeypatch):
    engine = Engine(loaded, tokenizer)
    first, other = (Client(engine, [5, token], max_new_tokens=6) for token in (40, 41))
    for name in ("put", "end"):
        monkeypatch.setattr(first.sequence._stream, name, lambda *ids: 1 / 0)
    engine.start()
    assert first.ends()[0] == "error" and other.ends()[0] == "length" and engine.is_open
    engine.close()
