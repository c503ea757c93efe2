"""Fields of requests that change answers: each changes an answer, and no answer depends on other requests."""

import json
import math

import pytest
import torch
from transformers.generation import TopPLogitsWarper

pytest.importorskip("openai")
pytest.importorskip("fastapi")

from test_serve_requests import COMPLETIONS, completion

from moepack.serving.http.server import Settings, create_app
from moepack.serving.text.generation import generate
from moepack.serving.text.sampling import Sampler, Sampling, Steered, TopP

GREEDY = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def write(ask):
    """A function that returns the choices of a completion."""

    def write(**fields):
        status, _, content = ask(COMPLETIONS, completion(prompt="The sea", **{**GREEDY, **fields}))
        assert status == 200, content
        return content["choices"]

    return write


@pytest.fixture(scope="module")
def plain(write):
    return write()[0]["text"]


@pytest.fixture(scope="module")
def tokens(write, engine):
    """The ids of the tokens of the plain answer."""
    scores = write(logprobs=0)[0]["logprobs"]
    ids = {engine.tokenizer.decode([token]): token for token in range(len(engine.tokenizer))}
    return [ids[token] for token in scores["tokens"] if token in ids]


def test_bias_removes_and_forces_tokens(write, plain, tokens):
    assert write(logit_bias={str(tokens[0]): -100})[0]["text"] != plain
    assert write(logit_bias={str(tokens[1]): 100})[0]["text"][:3] == plain[1] * 3


@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_the_answer_alone(engine, field):
    """A token of the prompt is not penalized, a token of the answer is: by each occurrence, or once."""
    steered = Steered(Sampling(**{field: 0.5}, max_new_tokens=9), prompt=2)
    scores = steered(torch.tensor([[7, 7, 5, 5, 6]]), torch.zeros(1, 10))[0]
    assert scores[7] == 0 and scores[6] == -0.5
    assert scores[5] == (-1 if field == "frequency_penalty" else -0.5)


def test_penalties_change_answers(write, tokens):
    forced = {str(tokens[0]): 30.0}
    same = write(logit_bias=forced)[0]["text"]
    assert len(set(same)) == 1
    assert write(logit_bias=forced, frequency_penalty=2, max_tokens=40)[0]["text"][:12] == same
    texts = {write(frequency_penalty=value)[0]["text"] for value in (-2, 0, 2)}
    assert len(texts) > 1


def test_typical_tokens_are_those_of_transformers():
    logits = torch.linspace(-3, 3, 40)
    processor = Sampler(Sampling(temperature=1.0, typical_p=0.3))
    kept = processor.scores(logits, [1]).isfinite()
    assert 0 < kept.sum() < 40 and not kept[-1]


def test_stop_tokens_end_an_answer_and_are_not_in_its_text(write, plain, tokens):
    first = tokens.index(tokens[3])
    choice = write(stop_token_ids=[tokens[3]])[0]
    assert (choice["text"], choice["finish_reason"]) == (plain[:first], "stop")
    later = write(stop_token_ids=[tokens[3]], min_tokens=8)[0]["text"]
    assert len(later) >= 8


def test_end_tokens_are_ignored_on_request(write, engine, monkeypatch, plain, tokens):
    monkeypatch.setattr(engine, "ends", frozenset({tokens[2]}))
    assert write()[0]["text"] == plain[: tokens.index(tokens[2])]
    assert write()[0]["finish_reason"] == "stop"
    assert write(ignore_eos=True)[0]["finish_reason"] == "length"


def test_several_prompts_and_answers_in_order(ask, engine):
    prompts = ["The sea", engine.tokenizer("a wolf").input_ids]
    choices = ask(COMPLETIONS, completion(**GREEDY | {"prompt": prompts, "n": 2}))[2]["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    wanted = [
        generate(engine.model, engine.tokenizer, text, Sampling(max_new_tokens=12)).text
        for text in ("The sea", "a wolf")
    ]
    assert [choice["text"] for choice in choices] == [wanted[0]] * 2 + [wanted[1]] * 2


def test_a_seed_gives_one_text_next_to_any_other_requests(write):
    drawn = {"temperature": 1.2, "seed": 5}
    alone = write(**drawn)[0]["text"]
    several = [choice["text"] for choice in write(**drawn, n=4)]
    assert several[0] == alone and len(set(several)) > 1
    assert several == [choice["text"] for choice in write(**drawn, n=4)]
    assert write(temperature=1.2, seed=6)[0]["text"] == several[1]


def test_the_best_answers_are_the_likeliest(write):
    drawn = {"temperature": 1.5, "seed": 3, "logprobs": 0}
    every = write(**drawn, n=4)
    mean = lambda choice: sum(choice["logprobs"]["token_logprobs"]) / len(choice["logprobs"]["tokens"])  # noqa: E731
    best = write(**drawn, n=1, best_of=4)[0]
    assert best["text"] == max(every, key=mean)["text"]


def test_scores_are_those_of_the_model(ask, engine):
    """The scores of the prompt and of the answer are those of one pass over both."""
    prompt = "The sea and the wolf"
    body = completion(prompt=prompt, **GREEDY, logprobs=3, echo=True) | {"max_tokens": 4}
    choice = ask(COMPLETIONS, body)[2]["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"].startswith(prompt) and "".join(scores["tokens"]) == choice["text"]
    ids = engine.tokenizer(choice["text"]).input_ids
    with torch.inference_mode():
        expected = engine.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    assert scores["token_logprobs"][0] is None and scores["top_logprobs"][0] is None
    for place, (token, value, top) in enumerate(
        zip(ids, scores["token_logprobs"], scores["top_logprobs"], strict=True)
    ):
        if place:
            assert math.isclose(value, expected[place - 1, token], abs_tol=2e-4)
            assert math.isclose(max(top.values()), expected[place - 1].max(), abs_tol=2e-4)
            assert 3 <= len(top) <= 4
    assert [
        choice["text"][start:][: len(token)]
        for start, token in zip(scores["text_offset"], scores["tokens"], strict=True)
    ] == scores["tokens"]


def test_offsets_count_characters_of_the_text(ask):
    asked = completion(prompt="Two 😀 cats", logprobs=1, echo=True) | {"max_tokens": 0}
    choice = ask(COMPLETIONS, asked)[2]["choices"][0]
    scores = choice["logprobs"]
    whole = [(start, token) for start, token in zip(scores["text_offset"], scores["tokens"], strict=True)
             if not token.startswith("bytes:")]  # fmt: skip
    assert len(whole) < len(scores["tokens"])
    assert all(choice["text"][start:].startswith(token) for start, token in whole)


def test_a_prompt_alone_is_scored(ask):
    choice = ask(COMPLETIONS, completion(prompt="The sea", logprobs=1, echo=True) | {"max_tokens": 0})[2]["choices"][0]
    assert choice["text"] == "The sea" and len(choice["logprobs"]["tokens"]) == 7
    assert choice["finish_reason"] == "length"


def test_long_prompts_are_scored_in_parts_as_in_one(ask, engine, monkeypatch):
    body = completion(prompt="the wolf and the sea " * 9, logprobs=0, echo=True) | {"max_tokens": 0}
    whole = ask(COMPLETIONS, body)[2]["choices"][0]["logprobs"]["token_logprobs"]
    monkeypatch.setattr("moepack.serving.engine.SCORED", 7)
    parts = ask(COMPLETIONS, body)[2]["choices"][0]["logprobs"]["token_logprobs"]
    torch.testing.assert_close(torch.tensor(parts[1:]), torch.tensor(whole[1:]), rtol=1e-4, atol=1e-4)


def test_a_length_beyond_the_context_is_clamped_and_said(ask, engine):
    _, _, content = ask(COMPLETIONS, completion(prompt="The sea", max_tokens=9999) | {"temperature": 0})
    assert content["usage"]["max_tokens"] == engine.context - 7
    assert content["usage"]["completion_tokens"] <= engine.context - 7
    assert "max_tokens" not in ask(COMPLETIONS, completion())[2]["usage"]


def test_settings_of_the_server_apply_where_a_request_sets_none(ask, engine):
    app = create_app(engine, Settings("tiny", sampling={"temperature": 1.5, "top_k": 5}))
    texts = {ask(COMPLETIONS, completion(max_tokens=8), app=app)[2]["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1
    texts = {
        ask(COMPLETIONS, completion(max_tokens=8, temperature=0), app=app)[2]["choices"][0]["text"] for _ in range(3)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("field", "holds"),
    [
        ({"guided_regex": "[a-c]{3}/[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "/"),
        ({"guided_choice": ["north", "south"]}, lambda text: text in ("north", "south")),
        ({"guided_grammar": 'start: "x" A A?\nA: /[yz]/'}, lambda text: text[0] == "x" and set(text[1:]) <= set("yz")),
        ({"grammar": 'root ::= "a" [0-9] "b"'}, lambda text: text[0] + text[2] == "ab"),
        ({"structured_outputs": {"choice": ["1", "2"]}}, lambda text: text in "12"),
        ({"guided_json": {"type": "boolean"}}, lambda text: text in ("true", "false")),
        ({"guided_json": '{"enum": ["x"]}'}, lambda text: text == '"x"'),
        ({"json_schema": {"const": 5}}, lambda text: text == "5"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {
            "type": "object", "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["a"],
            "additionalProperties": False}}}}, lambda text: 0 <= json.loads(text)["a"] <= 9),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_answers_follow_a_grammar(write, field, holds):
    pytest.importorskip("llguidance")
    for drawn in ({}, {"temperature": 2.0, "seed": 1}):
        choice = write(**field, **drawn, max_tokens=120)[0]
        assert choice["finish_reason"] == "stop" and holds(choice["text"]), choice


def test_streams_of_several_prompts_are_the_whole_answers(ask):
    """With the prompts, their scores and two answers each."""
    body = completion(prompt=["The sea", "a wolf"], logprobs=2, echo=True, n=2, temperature=1.1, seed=9, max_tokens=6)
    whole = ask(COMPLETIONS, body)[2]["choices"]
    data = ask(COMPLETIONS, {**body, "stream": True})[2].decode()
    chunks = [json.loads(event.removeprefix("data: ")) for event in data.split("\n\n")[:-2]]
    for choice in whole:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            found = [value for part in own for value in part["logprobs"][name]]
            expected = choice["logprobs"][name]
            if name == "token_logprobs":
                found, expected = ([value or 0.0 for value in values] for values in (found, expected))
                assert found == pytest.approx(expected, abs=1e-4)
            else:
                assert found == expected


def test_more_answers_than_the_queue_takes_are_refused(ask, engine):
    prompts = ["x"] * (engine.slots + engine.queue + 1)
    status, _, content = ask(COMPLETIONS, completion(prompt=prompts))
    assert (status, content["error"]["code"], content["error"]["param"]) == (400, "too_many_answers", "prompt")


class Odd:
    """Allows odd tokens."""

    def allows(self, token):
        return token % 2 == 1

    def allowed(self):
        return torch.arange(5000) % 2 == 1


@pytest.mark.parametrize("best", [6, 7])
def test_greedy_answers_take_the_likeliest_allowed_token(best):
    logits = torch.zeros(5000)
    logits[best], logits[101] = 9.0, 8.0
    assert Sampler(Sampling(), allowed=Odd()).choose(logits, [0]) == (7 if best == 7 else 101)


def test_drawn_tokens_are_allowed():
    sampler = Sampler(Sampling(temperature=2.0), allowed=Odd())
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert all(sampler.choose(logits, [0] * n) % 2 for n in range(100))


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0, 30.0], ids=lambda spread: f"spread{spread}")
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_tokens_of_transformers(spread, top_p):
    """Whether or not the likeliest tokens suffice."""
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(1, 3000, generator=generator) * spread
    kept = TopP(top_p)(None, scores)
    wanted = TopPLogitsWarper(top_p)(None, scores)
    assert abs(int(kept.isfinite().sum()) - int(wanted.isfinite().sum())) <= 1  # sums round differently
    both = kept.isfinite() & wanted.isfinite()
    assert torch.equal(kept[both], scores[both]) and both.sum() >= 1 and both.sum() >= wanted.isfinite().sum() - 1


def test_a_place_in_an_answer_has_one_random_number():
    sampler, other = (Sampler(Sampling(temperature=1.0, seed=3), prompt=2) for _ in range(2))
    logits = torch.randn(500, generator=torch.Generator().manual_seed(0))
    later = sampler.choose(logits, [0] * 7)
    drawn = [sampler.choose(logits, [0] * n) for n in range(2, 8)]
    assert drawn == [other.choose(logits, [0] * n) for n in range(2, 8)] and drawn[5] == later and len(set(drawn)) > 3


def test_drawn_tokens_have_the_probabilities_of_the_model():
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    drawn = torch.tensor([sampler.choose(probabilities.log(), [0] * n) for n in range(4000)])
    torch.testing.assert_close(drawn.bincount(minlength=6) / 4000, probabilities, rtol=0, atol=0.03)
    assert not set(drawn.tolist()) & {0, 2, 5}
