"""lm-eval over HTTP gives the figures that it gives with the model in its process."""

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("tenacity")
api = pytest.importorskip("lm_eval.models.openai_completions")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402

from moepack.integrations.loading import open_model, open_tokenizer  # noqa: E402
from moepack.serving.engine import Engine  # noqa: E402
from moepack.serving.http.server import Settings, create_app  # noqa: E402
from serving_support import running  # noqa: E402

QUESTIONS = [
    ("The sea is", " wide"),
    ("The sea is", " a wolf"),
    ("A wolf", " sings"),
    ("A wolf", " runs é"),
    ("Fire " * 40, "x"),
]


def asked(kind, arguments):
    return [Instance(kind, {}, given, number) for number, given in enumerate(arguments)]


def test_likelihoods_and_texts_are_those_of_the_model(packed):
    tokenizer = open_tokenizer(packed)
    model = open_model(packed, "float32", mode="exact")
    local = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    known = local.loglikelihood(asked("loglikelihood", QUESTIONS), disable_tqdm=True)
    options = {"until": ["q"], "max_gen_toks": 12, "do_sample": False}
    prompts = [(question, dict(options)) for question, _ in QUESTIONS]
    written = local.generate_until(asked("generate_until", prompts), disable_tqdm=True)
    with running(create_app(Engine(model, tokenizer, slots=4), Settings("tiny"))) as port:
        remote = api.LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{port}/v1/completions",
            model="tiny",
            tokenizer=str(packed),
            tokenizer_backend="huggingface",
            batch_size=4,
        )
        found = remote.loglikelihood(asked("loglikelihood", QUESTIONS), disable_tqdm=True)
        texts = remote.generate_until(asked("generate_until", prompts), disable_tqdm=True)
    for (value, is_greedy), (other, is_other_greedy) in zip(found, known, strict=True):
        assert value == pytest.approx(other, abs=2e-3) and is_greedy == is_other_greedy
    assert texts == written
