"""Drawing tokens of several sequences at once draws what the sampler of one sequence draws."""

import pytest
import torch

from moepack.decoding.drawing import GREEDY, LIKELIEST, UNSURE, draw
from moepack.serving.text.sampling import Sampler, Sampling

SETTINGS = [
    {}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.3}, {"top_p": 0.8, "top_k": 40}, {"min_p": 0.2},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05}, {"temperature": 1e-9}, {"temperature": 0.3, "top_p": 0.95},
]  # fmt: skip


def samplers(settings, seed):
    return [Sampler(Sampling(**{"temperature": 0.9, "seed": seed + n, **own})) for n, own in enumerate(settings)]


def drawn(logits, draws):
    return draw(logits, torch.tensor(draws, dtype=torch.float64).T.contiguous()).tolist()


@pytest.mark.parametrize("vocabulary", [5, 300, 5000])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_tokens_are_those_of_the_sampler(vocabulary, spread):
    for seed in range(20):
        own = samplers(SETTINGS, seed)
        logits = torch.randn(len(own), vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
        found = drawn(logits, [sampler.draw(0) for sampler in own])
        expected = [sampler.choose(row, []) for sampler, row in zip(own, logits, strict=True)]
        sure = [token != UNSURE for token in found]
        assert [token for token, is_sure in zip(found, sure, strict=True) if is_sure] == [
            token for token, is_sure in zip(expected, sure, strict=True) if is_sure
        ]
        assert all(sure) or (vocabulary > LIKELIEST and spread < 1)


def test_other_rows_take_the_likeliest_token_or_say_why_not():
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)) * 0.1
    logits[2, 77], logits[3, 5] = torch.nan, -torch.inf
    flat = samplers([{"top_p": 0.99, "temperature": 2.0}], 0)[0].draw(0)
    found = drawn(logits, [GREEDY, flat, GREEDY, flat])
    assert found == [int(logits[0].argmax()), UNSURE, -1, -1]


def test_the_distribution_is_that_of_the_model():
    probabilities = torch.zeros(700)
    probabilities[[3, 255, 256, 699]] = torch.tensor([0.1, 0.4, 0.3, 0.2])
    rows = (probabilities + 1e-30).log().expand(4000, -1)
    uniform = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    draws = torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64).expand(-1, 4000)
    counts = draw(rows, torch.cat([draws, uniform[None]])).bincount(minlength=700)
    torch.testing.assert_close(counts / 4000, probabilities, rtol=0, atol=0.03)
    assert int(counts[probabilities == 0].sum()) == 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_tokens_at_the_ends_have_a_probability(uniform):
    logits = torch.full((2, 600), -100.0)
    logits[0, 10:20] = logits[1, 250:260] = 3.0
    found = drawn(logits, [(1.0, 0, 1.0, 0.5, uniform)] * 2)
    assert found == ([10, 250] if uniform == 0 else [19, 259])
