"""A sequence's output does not depend on other sequences: alone, next to or after a long one, or with a shared prefix.

The reference is a freshly loaded model that reads the sequence in one pass, then token by token.
"""

import copy
import re
import string
import threading

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import DynamicCache, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moepack.census.tiny import tiny_config, tiny_model
from moepack.decoding.carried import carried_of
from moepack.decoding.prefix import Prefix, new_cache
from moepack.integrations.loading import open_model
from moepack.serving import engine as engine_module
from moepack.serving.engine import Engine
from moepack.serving.isolation import Part
from moepack.serving.step import Stepper
from moepack.serving.text.generation import Memory, generate
from moepack.serving.text.sampling import Sampler, Sampling
from places import ROOT

TABLE = (ROOT / "docs" / "models.md").read_text()
ARCHITECTURES = re.findall(r"^\| `([\w-]+)` \| (?:works|text part only)", TABLE, re.M)
NEW = 6
NARROW = {"sliding_window": 8, "attention_chunk_size": 8, "index_topk": 8}
"""What bounds how far a token sees; tiny models have more than their sequences."""


def letters():
    """A tokenizer of 64 characters, without an end."""
    alphabet = string.ascii_letters + string.digits + " ."
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def tokens(count, seed):
    return torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def narrowed(settings):
    """The settings of a configuration that `NARROW` changes."""
    own = {key: NARROW[key] for key in settings if key in NARROW and isinstance(settings[key], int)}
    nested = {
        key: narrowed(value) for key, value in settings.items() if key.endswith("config") and isinstance(value, dict)
    }
    return {**own, **{key: value for key, value in nested.items() if value}}


def narrow_model(architecture):
    """A tiny model that sees few tokens back, where its configuration may say so."""
    try:
        return tiny_model(architecture, own=narrowed(tiny_config(architecture).to_dict()))
    except Exception:  # sizes that do not fit each other
        return tiny_model(architecture)


def ending_nowhere(model):
    model.generation_config.eos_token_id = None
    return model


def alone(model, ids):
    """The logits behind a prompt and behind each of the likeliest tokens, as transformers generates; and the tokens."""
    fresh = copy.deepcopy(model)
    with torch.inference_mode():
        found = fresh.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return found.sequences[0].tolist(), torch.cat(found.logits)


class Noting(Sampler):
    """A sampler that keeps the logits which it chooses from."""

    def __init__(self, sampling, rows):
        super().__init__(sampling)
        self.rows = rows

    def choose(self, logits, ids):
        self.rows.append(logits)
        return super().choose(logits, ids)


class Served:
    """An engine that notes the logits which it chooses from."""

    def __init__(self, model, together):
        self.engine = Engine(model, letters(), slots=8)
        self.engine._ends = frozenset()
        self.engine._stepper.pace.note(False, 1, 1e9 if together else 0.0)

    def ask(self, *prompts, start=False):
        """Prompts that are read at a time; for each the tokens and the logits behind them."""
        ended, asked, seen = threading.Semaphore(0), [], [[] for _ in prompts]
        for ids, rows in zip(prompts, seen, strict=True):
            sequence = self.engine.submit(
                ids, Sampling(max_new_tokens=NEW), lambda piece: piece.finish and ended.release()
            )
            choose = sequence._sampler.choose
            sequence._sampler.choose = lambda row, ids, rows=rows, choose=choose: (rows.append(row), choose(row, ids))[
                1
            ]
            asked.append(sequence)
        if start:
            self.engine.start()
        for _ in asked:
            assert ended.acquire(timeout=60)
        return [(sequence.ids, torch.stack(rows) if rows else None) for sequence, rows in zip(asked, seen, strict=True)]


def close(found, expected):
    """Whether tokens and logits are the same; experts of equal score may be chosen by rounding."""
    if found[0] != expected[0]:
        return False
    return bool(((found[1] - expected[1]).norm(dim=-1) <= 2e-3 * expected[1].norm(dim=-1)).all())


def require_alone(model, together=True, long=70, common=40):
    """Serve prompts in company, and then again behind each other; each must get what it gets alone."""
    first = tokens(long, 1)
    prompts = [first, tokens(5, 2), first[:common] + tokens(6, 3), tokens(1, 4)]
    try:
        expected = [alone(model, ids) for ids in prompts]
    except Exception as error:  # of transformers, which reads it alone
        pytest.skip(f"transformers does not generate with it: {type(error).__name__}: {error}")
    served = Served(model, together)
    found = served.ask(*prompts, start=True)
    found += [served.ask(ids)[0] for ids in prompts]
    served.engine.close()
    wrong = [number for number, pair in enumerate(zip(found, expected * 2, strict=True)) if not close(*pair)]
    assert not wrong, wrong
    return served.engine


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(engine_module, "CHUNK", 24)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture(architecture):
    try:
        model = narrow_model(architecture)
    except Exception as error:  # whatever the installed transformers says of its own architecture
        pytest.skip(f"transformers does not build a tiny one: {type(error).__name__}: {error}")
    if model.config.is_encoder_decoder:
        pytest.skip("an encoder-decoder is not served")
    if not model.can_generate():
        pytest.skip("the model does not generate")
    require_alone(ending_nowhere(model))


D = 4
LONG = {"short_factor": [1.0] * D, "long_factor": [2.0 + i for i in range(D)], "original_max_position_embeddings": 32}
ROPE = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {**LONG, "factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "proportional": {"partial_rotary_factor": 0.5},
    "default": {},
}
VARYING = {"dynamic", "longrope"}


def rotated(architecture, kind, **more):
    """A model with rotary positions of a kind, for 32 tokens originally, whose attention matters."""
    parameters = {"rope_type": kind, "rope_theta": 100.0, **ROPE[kind], **more}
    if architecture == "mellum":
        parameters = {"full_attention": parameters}
    own = {"rope_parameters": parameters, "head_dim": 8, "max_position_embeddings": 32 if kind == "dynamic" else 128}
    model = ending_nowhere(tiny_model(architecture, own=own))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if re.search("[qk]_proj.weight", name):
                weight.mul_(3)
    return model


def test_every_kind_of_rotary_positions_is_tried():
    assert set(ROPE_INIT_FUNCTIONS) <= set(ROPE)


CASES = [("mixtral", kind) for kind in ROPE]
CASES += [(architecture, kind) for architecture in ("qwen3_moe", "deepseek_v3", "mellum") for kind in sorted(VARYING)]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_every_kind_of_rotary_positions(architecture, kind, together):
    """Sequences that are short, that are long, and that grow beyond the length at which frequencies change."""
    model = rotated(architecture, kind)
    assert carried_of(model).limit == (32 if kind in VARYING else None)
    require_alone(model, together)
    if kind in VARYING:
        require_alone(model, together, long=29, common=20)


@pytest.mark.parametrize("together", [True, False])
def test_phimoe(together):
    """Its factor of all rotations depends on the length, and its generation reads again what outgrows the limit."""
    model = rotated("phimoe", "longrope", short_mscale=1.1, long_mscale=1.5)
    carried = carried_of(model)
    assert (carried.limit, carried.rereads) == (32, True)
    ids, rows = alone(model, tokens(29, 1))
    with torch.inference_mode():
        if not torch.allclose(copy.deepcopy(model)(torch.tensor([ids[:-1]])).logits[0, -1], rows[-1], atol=1e-3):
            pytest.skip("transformers reads one token where it should read all again")
    require_alone(model, together)
    require_alone(model, together, long=29, common=20)


@pytest.mark.parametrize("kind", sorted(VARYING))
def test_short_sequences_still_share_passes_and_prefixes(kind, monkeypatch):
    model = rotated("mixtral", kind)
    sizes, original = [], Stepper._together
    monkeypatch.setattr(Stepper, "_together", lambda self, parts: (sizes.append(len(parts)), original(self, parts))[1])
    served = Served(model, together=True)
    served.ask(tokens(8, 1), tokens(9, 2), start=True)
    assert 2 in sizes
    served.ask(tokens(20, 3))
    read, forward = [], Stepper.forward
    monkeypatch.setattr(Stepper, "forward", lambda self, parts: (read.append(parts), forward(self, parts))[1])
    served.ask([*tokens(20, 3), 5])
    assert len(read[0][0].ids) == 1
    served.engine.close()


@pytest.mark.parametrize("kind", sorted(VARYING))
def test_prefixes_of_long_sequences_are_not_shared(kind):
    limit = 32
    cache = DynamicCache()
    assert not Prefix(list(range(limit + 1)), cache, limit).is_useful
    assert Prefix(list(range(limit)), cache, limit).shared(list(range(limit))) == limit - 1
    assert Prefix(list(range(limit)), cache, limit).shared(list(range(limit + 1))) == 0


@pytest.mark.parametrize("kind", sorted(VARYING))
def test_whoever_calls_the_model_begins_anew(kind):
    """`generate` and plain calls, behind a longer sequence; a chat whose text grows beyond the limit."""
    model, tokenizer = rotated("mixtral", kind), letters()
    fresh = copy.deepcopy(model)
    sampling, texts = (
        Sampling(max_new_tokens=NEW),
        ["The sea" * 3, "She opened the door" * 4, "The sea" * 3 + " and the wolf"],
    )
    expected = [generate(copy.deepcopy(fresh), tokenizer, text, sampling).text for text in texts]
    assert [generate(model, tokenizer, text, sampling).text for text in [*texts, texts[0]]] == [*expected, expected[0]]
    memory = Memory()
    assert [generate(model, tokenizer, text, sampling, memory=memory).text for text in texts] == expected
    for length in (70, 32, 33, 5):
        ids = torch.tensor([tokens(length, length)])
        with torch.inference_mode():
            assert torch.equal(model(ids).logits, copy.deepcopy(fresh)(ids).logits)


@pytest.mark.parametrize("kind", sorted(VARYING))
def test_a_loaded_model_begins_anew(kind, tmp_path):
    model = rotated("mixtral", kind)
    model.save_pretrained(tmp_path / "model")
    loaded, ids = open_model(tmp_path / "model"), [torch.tensor([tokens(count, 1)]) for count in (80, 40)]
    with torch.inference_mode():
        loaded(ids[0])
        torch.testing.assert_close(loaded(ids[1]).logits, open_model(tmp_path / "model")(ids[1]).logits)


def test_a_model_that_has_read_much_is_not_taken_for_a_new_one():
    model = rotated("mixtral", "dynamic")
    fresh, ids = copy.deepcopy(model), torch.tensor([tokens(32, 1)])
    with torch.inference_mode():
        expected = fresh(ids).logits
        model(torch.tensor([tokens(100, 2)]))
        assert not torch.allclose(model(ids).logits, expected)  # what transformers leaves behind
        carried_of(model)
        assert torch.equal(model(ids).logits, expected)


def test_positions_of_an_image_are_not_those_of_the_next_text():
    model = tiny_model("qwen3_vl_moe")
    prompt, next_token = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[7]])
    with torch.inference_mode():
        expected = model(torch.cat([prompt, next_token], 1)).logits[:, -1]
        carried_of(model)
        model.model.rope_deltas = torch.tensor([[9]])
        cache = new_cache(model)
        model(input_ids=prompt, past_key_values=cache)
        torch.testing.assert_close(model(input_ids=next_token, past_key_values=cache).logits[:, -1], expected)


def test_a_reference_that_no_window_forgets_is_read_in_one_pass():
    """Layers of a cache that a model brings itself may tell the first pass from later ones."""
    stepper = Stepper(tiny_model("mixtral"))
    assert not stepper.reads_whole(1 << 20)
    stepper._in_pieces = False
    assert stepper.reads_whole(30)


def test_memory_that_runs_out_does_not_cut_what_must_be_whole():
    from moepack.serving.isolation import isolated

    sizes = []

    def read(parts):
        sizes.append([len(part.ids) for part in parts])
        raise torch.OutOfMemoryError("out of memory")

    (found,) = isolated(read, [Part([1, 2, 3], 0, DynamicCache(), is_whole=True)])
    assert isinstance(found, torch.OutOfMemoryError) and sizes == [[3]]
