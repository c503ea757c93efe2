"""Drawing tokens: the kernel compiled for the host chooses what the sampler of one sequence chooses."""

import pytest
import torch
from emulation import Emulator
from test_step import _run

from moepack.decoding.drawing import GREEDY
from moepack.serving.text.sampling import Sampler, Sampling

TYPES = torch.bfloat16, torch.float16, torch.float32
SETTINGS = [
    {}, {"top_k": 1}, {"top_k": 7}, {"top_p": 0.3}, {"top_p": 0.8, "top_k": 40}, {"min_p": 0.2},
    {"top_p": 0.9, "top_k": 20, "min_p": 0.05}, {"temperature": 1e-9}, {"temperature": 0.3, "top_p": 0.95},
    {"temperature": 3.0, "top_p": 0.99},
]  # fmt: skip


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return Emulator("draw.cpp", tmp_path_factory.mktemp("draw"))("draw.cu", "none")


@pytest.fixture
def draw(program, tmp_path):
    def drawn(logits, draws, threads=64):
        fields = torch.tensor(draws, dtype=torch.float64).T
        numbers = TYPES.index(logits.dtype), *logits.shape, threads
        return _run(program, tmp_path, (logits, fields), *numbers).view(torch.int64).tolist()

    return drawn


@pytest.mark.parametrize(("vocabulary", "threads"), [(1, 64), (5, 64), (300, 128), (5000, 64)])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_tokens_are_those_of_the_sampler(draw, vocabulary, spread, threads):
    for seed in range(2):
        own = [Sampler(Sampling(**{"temperature": 0.9, "seed": seed + n, **each})) for n, each in enumerate(SETTINGS)]
        logits = torch.randn(len(own), vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
        found = draw(logits, [sampler.draw(0) for sampler in own], threads)
        assert found == [sampler.choose(row, []) for sampler, row in zip(own, logits, strict=True)]


@pytest.mark.parametrize("dtype", TYPES[:2])
def test_half_precision(draw, dtype):
    logits = (torch.randperm(400, generator=torch.Generator().manual_seed(0)) / 64).to(dtype).expand(len(SETTINGS), -1)
    own = [Sampler(Sampling(**{"temperature": 0.9, "seed": n, **each})) for n, each in enumerate(SETTINGS)]
    distinct = logits.contiguous()
    if dtype is torch.bfloat16:  # eight bits: equal logits at a limit are all kept
        own = [sampler for sampler in own if not (sampler._sampling.top_p < 1 or sampler._sampling.top_k)]
        distinct = distinct[: len(own)]
    found = draw(distinct, [sampler.draw(0) for sampler in own])
    assert found == [sampler.choose(row, []) for sampler, row in zip(own, distinct, strict=True)]


def test_rows_without_a_temperature_take_the_first_likeliest_token(draw):
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    logits[0, [33, 40]], logits[2, 77], logits[3, 5] = 9.0, torch.nan, -torch.inf
    drawn = Sampler(Sampling(temperature=2.0)).draw(0)
    assert draw(logits, [GREEDY, drawn, GREEDY, drawn])[::2] == [33, -1]
    assert draw(logits, [GREEDY, drawn, GREEDY, drawn])[3] == -1


def test_the_distribution_is_that_of_the_model(draw):
    probabilities = torch.zeros(300)
    probabilities[[3, 255, 256, 299]] = torch.tensor([0.1, 0.4, 0.3, 0.2])
    rows = (probabilities + 1e-30).log().expand(200, -1).contiguous()
    uniform = torch.rand(200, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist()
    found = draw(rows, [(1.0, 0, 1.0, 0.0, each) for each in uniform])
    counts = torch.tensor(found).bincount(minlength=300)
    torch.testing.assert_close(counts / 200, probabilities, rtol=0, atol=0.1)
    assert int(counts[probabilities == 0].sum()) == 0


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_tokens_at_the_ends_have_a_probability(draw, uniform):
    logits = torch.full((2, 600), -100.0)
    logits[0, 10:20] = logits[1, 250:260] = 3.0
    assert draw(logits, [(1.0, 0, 1.0, 0.5, uniform)] * 2) == ([10, 250] if uniform == 0 else [19, 259])
