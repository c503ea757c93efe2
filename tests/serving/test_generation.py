"""Text generation: sampling, stop strings, chat templates, streamed text, and the command `generate`."""

from dataclasses import replace
from queue import Queue

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import moepack
from moepack.cli import app
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.serving.engine import Engine
from moepack.serving.text.generation import Memory, generate
from moepack.serving.text.prompts import prompt_ids
from moepack.serving.text.sampling import Sampler, Sampling
from moepack.serving.text.stream import TextStream
from tiny_models import TEMPLATE


@pytest.fixture(scope="module")
def model(mixtral):
    return open_model(mixtral)


@pytest.fixture(scope="module")
def tokenizer(mixtral):
    return open_tokenizer(mixtral)


@pytest.fixture
def run():
    verbosity = transformers.logging.get_verbosity()
    yield lambda *arguments, **options: CliRunner().invoke(app, [str(value) for value in arguments], **options)
    transformers.logging.set_verbosity(verbosity)


def test_pieces_join_to_the_text_and_never_split_a_character(model, tokenizer):
    """Random weights generate random bytes, so characters span tokens."""
    pieces = []
    sampling = Sampling(max_new_tokens=80, temperature=1.0, seed=3)
    report = generate(model, tokenizer, "é", sampling, on_text=pieces.append)
    assert "".join(pieces) == report.text
    assert 1 < len(pieces) < report.tokens <= 80
    assert report.prompt_tokens == 2
    assert report.tokens_per_second > 0
    assert generate(model, tokenizer, "é", sampling).text == report.text
    assert generate(model, tokenizer, "é", Sampling(max_new_tokens=80, temperature=1.0, seed=4)).text != report.text


@pytest.mark.parametrize(
    "published",
    [
        {"num_beams": 4},
        {"num_return_sequences": 3, "do_sample": True},
        {"cache_implementation": "static"},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": "low"},
    ],
)
def test_ways_of_searching_that_a_model_is_published_with_are_set_aside(model, tokenizer, monkeypatch, published):
    sampling = Sampling(max_new_tokens=4)
    expected = generate(model, tokenizer, "The sea", sampling).text
    monkeypatch.setattr(model, "generation_config", transformers.GenerationConfig(**published))
    for memory in (None, Memory()):
        assert generate(model, tokenizer, "The sea", sampling, memory=memory).text == expected


def test_stop_strings_that_a_model_is_published_with_end_the_text(model, tokenizer, monkeypatch):
    text = generate(model, tokenizer, "The sea", Sampling(max_new_tokens=40)).text
    letter = next(character for character in text if character.isascii() and character.isprintable())
    monkeypatch.setattr(model, "generation_config", transformers.GenerationConfig(stop_strings=[letter]))
    expected = text[: text.index(letter)]
    assert generate(model, tokenizer, "The sea", Sampling(max_new_tokens=40)).text == expected
    engine, pieces = Engine(model, tokenizer).start(), Queue()
    engine.submit(tokenizer("The sea").input_ids, Sampling(max_new_tokens=40), pieces.put)
    found = [pieces.get(timeout=60)]
    while found[-1].finish is None:
        found.append(pieces.get(timeout=60))
    engine.close()
    assert found[-1].finish == "stop" and "".join(piece.text for piece in found) == expected


@pytest.mark.parametrize("name", ["forced_eos_token_id", "forced_bos_token_id"])
def test_published_tokens_that_the_model_does_not_have_are_named(model, tokenizer, monkeypatch, name):
    monkeypatch.setattr(model, "generation_config", transformers.GenerationConfig(**{name: 9999}))
    with pytest.raises(moepack.errors.TokenError, match=r"generation_config\.json: token 9999 is out"):
        generate(model, tokenizer, "The sea", Sampling(max_new_tokens=4))


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet="aBc é", max_size=24), stop=st.lists(st.text("aBc é", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string_wherever_tokens_end(tokenizer, text, stop):
    ids = tokenizer(text).input_ids
    whole = TextStream(tokenizer, stop)
    pieces = [whole.put([token]) for token in ids] + [whole.end()]
    found = [(text.find(string) + len(string), text.find(string)) for string in stop if string in text]
    assert "".join(pieces) == whole.text == text[: min(found, default=(0, len(text)))[1]]
    assert whole.stopped == bool(found)


def test_a_stop_string_ends_the_work(model, tokenizer):
    free = generate(model, tokenizer, "The sea", Sampling(max_new_tokens=40))
    stop = free.text[5:8]
    stopped = generate(model, tokenizer, "The sea", Sampling(max_new_tokens=40, stop=(stop,)))
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.tokens < free.tokens


@pytest.mark.parametrize(
    "chosen",
    [
        {"top_k": 3},
        {"top_p": 0.5},
        {"min_p": 0.05},
        {"repetition_penalty": 3.0},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
    ],
    ids=lambda chosen: "-".join(chosen),
)
def test_the_sampler_and_transformers_leave_the_same_tokens(model, chosen):
    """`Sampler` samples from the same distribution as transformers' `generate` with its list of processors."""
    sampling = Sampling(temperature=0.8, **chosen)
    config = transformers.GenerationConfig(**sampling.arguments())
    logits, ids = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)), [3, 5, 7, 7]
    processors = model._get_logits_processor(config, input_ids_seq_length=4, device="cpu")
    wanted = processors(torch.tensor([ids]), logits.clone())[0]
    sampler = Sampler(sampling)
    assert torch.equal(sampler.scores(logits[0], ids), wanted)
    drawn = [Sampler(replace(sampling, seed=seed)).choose(logits[0], ids) for seed in range(50)]
    assert wanted[drawn].isfinite().all() and len(set(drawn)) > 1


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1},
     {"min_p": 2.0}, {"repetition_penalty": 0.0}, {"max_new_tokens": 0}, {"stop": ("",)}],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_a_model_may_be_published_with_settings(model, monkeypatch):
    assert Sampling.of_model(model, top_k=None) == Sampling(seed=None)
    published = transformers.GenerationConfig(do_sample=True, temperature=0.6, top_k=20)
    monkeypatch.setattr(model, "generation_config", published)
    assert Sampling.of_model(model, top_k=5) == Sampling(temperature=0.6, top_k=5, seed=None)


def test_chats_need_a_template_and_follow_it(tokenizer, mixtral):
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    with pytest.raises(ValueError, match="no chat template"):
        prompt_ids(tokenizer, messages)
    own = open_tokenizer(mixtral)
    own.chat_template = TEMPLATE
    assert own.decode(prompt_ids(own, messages)) == "s:be kind\nu:hello\na:"
    own.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="rejects the messages: roles must alternate"):
        prompt_ids(own, messages)
    own.chat_template = "{{ 1 + messages[0]['content'] }}"
    with pytest.raises(ValueError, match="rejects the messages: TypeError"):
        prompt_ids(own, messages)


@pytest.mark.parametrize("text", ["a\ud800b", "\udcff"])
def test_text_that_is_not_unicode_is_refused(run, mixtral, tokenizer, text):
    with pytest.raises(ValueError, match="lone surrogate at character"):
        prompt_ids(tokenizer, text)
    result = run("generate", mixtral, "--prompt", text)
    assert result.exit_code == 2 and "surrogate" in result.stderr


def test_the_coldest_temperatures_take_the_likeliest_token(model, tokenizer):
    likeliest = generate(model, tokenizer, "The sea", Sampling(max_new_tokens=6)).text
    for temperature in (1e-6, 1e-9, 5e-324):
        assert generate(model, tokenizer, "The sea", Sampling(temperature, max_new_tokens=6)).text == likeliest


def test_a_memory_saves_reading_and_changes_nothing(model, tokenizer):
    memory, sampling = Memory(), Sampling(max_new_tokens=8)
    first = generate(model, tokenizer, "The sea", sampling, memory=memory)
    text = "The sea" + first.text + " and"
    assert memory.prefix.shared(prompt_ids(tokenizer, text)) >= 7
    again = generate(model, tokenizer, text, sampling, memory=memory)
    assert again.text == generate(model, tokenizer, text, sampling).text
    other = generate(model, tokenizer, "The wolf", sampling, memory=memory)
    assert other.text == generate(model, tokenizer, "The wolf", sampling).text


def test_more_than_the_model_was_made_for_is_warned_of(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model.config, "max_position_embeddings", 10)
    with pytest.warns(moepack.MoepackWarning, match="7 prompt tokens and 4 new tokens exceed the context length of 10"):
        generate(model, tokenizer, "The sea", Sampling(max_new_tokens=4))


def test_prompts_come_from_arguments_files_and_standard_input(run, packed, tmp_path):
    (tmp_path / "prompt").write_text("The sea é", encoding="utf-8")
    options = ["--max-new-tokens", 3]
    given = run("generate", packed, "--prompt", "The sea é", *options)
    assert given.exit_code == 0 and given.stdout.startswith("The sea é")
    assert run("generate", packed, "--prompt-file", tmp_path / "prompt", *options).stdout == given.stdout
    assert run("generate", packed, "--prompt", "-", *options, input="The sea é").stdout == given.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--max-new-tokens", 0], "--max-new-tokens"),
        (["--temperature", -1], "--temperature"),
        (["--prompt", ""], "the prompt has no tokens"),
        (["--top-p", 0], "top_p must be above 0"),
        (["--system", "be kind"], "--system needs --chat"),
        (["--chat"], "no chat template"),
        (["--prompt-file", __file__], "either --prompt or --prompt-file"),
    ],
)
def test_generate_usage_errors(run, mixtral, arguments, said):
    result = run("generate", mixtral, "--prompt", "a", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr.replace("\n", " ")
