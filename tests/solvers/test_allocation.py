"""Byte allocation: properties of the solver, and equality with the naive searches that it replaces.

The reference searches below are naive and handle one kind of proposal each: group sizes by a heap of steps, ranks by
one sorted list, grids by bisection of a price, prices by a walk along a summed curve.
"""

import heapq
import itertools
import math
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.allocation.budget import Steps, allocate, hull
from moepack.allocation.candidates import Candidate, Chain
from moepack.allocation.importance import curvatures, evenness, relative, shares, visits
from moepack.allocation.price import Curves, PricedBudget
from moepack.calibration.experts import waves_of
from moepack.checkpoint import Checkpoint, describe
from moepack.methods.finequant.planning import proposals
from moepack.methods.milo.planning import Planner, find_sources
from moepack.solvers.affine import GroupSpec
from moepack.solvers.least_squares import LeastSquares
from places import SHARED, TINY_MOE

KEPT = [SHARED / "models" / name for name in ("tiny-mixtral", "mixtral-25m", "qwen3moe-22m")]
MODELS = [TINY_MOE, *(path for path in KEPT if path.is_dir())]


def chain(*steps: tuple[int, float]) -> Chain:
    return Chain(np.array([cost for cost, _ in steps], np.int64), np.array([gain for _, gain in steps], np.float64))


def points(*pairs: tuple[int, float]) -> list[Candidate[int]]:
    return [Candidate("groupwise", at, nbytes, loss) for at, (nbytes, loss) in enumerate(pairs)]


# --- twins ------------------------------------------------------------------------------------------------------------


def twin_sizes(tensors: list[list[Candidate[Any]]], budget: int) -> list[int]:
    """Takes steps along each tensor's hull from a heap in order of decreasing gain per byte; a step that does not
    fit ends its tensor."""
    hulls = [twin_hull(candidates) for candidates in tensors]
    picked = [own[0] for own in hulls]
    left = budget - sum(candidates[at].nbytes for candidates, at in zip(tensors, picked, strict=True))

    def step(tensor: int, position: int) -> tuple[float, int, int]:
        here, there = (tensors[tensor][at] for at in hulls[tensor][position : position + 2])
        return -(here.loss - there.loss) / (there.nbytes - here.nbytes), tensor, position

    heap = [step(tensor, 0) for tensor, own in enumerate(hulls) if len(own) > 1]
    heapq.heapify(heap)
    while heap:
        _, tensor, position = heapq.heappop(heap)
        here, there = hulls[tensor][position : position + 2]
        cost = tensors[tensor][there].nbytes - tensors[tensor][here].nbytes
        if cost <= left:
            left, picked[tensor] = left - cost, there
            if position + 2 < len(hulls[tensor]):
                heapq.heappush(heap, step(tensor, position + 1))
    return picked


def twin_hull(candidates: list[Candidate[Any]]) -> list[int]:
    found: list[int] = []
    for at in sorted(range(len(candidates)), key=lambda at: (candidates[at].nbytes, candidates[at].loss)):
        x, y = candidates[at].nbytes, candidates[at].loss
        if found and y >= candidates[found[-1]].loss:
            continue
        while len(found) > 1:
            (x0, y0), (x1, y1) = ((candidates[i].nbytes, candidates[i].loss) for i in found[-2:])
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            found.pop()
        found.append(at)
    return found


def twin_ranks(chains: list[Chain], budget: float) -> list[int]:
    """Takes all steps from one list in order of decreasing gain per byte, then place, then chain; a step that does
    not fit ends its chain."""
    steps = [
        (-min(own.gains[: place + 1]) / own.costs[place], place, owner)
        for owner, own in enumerate(chains)
        for place in range(len(own.gains))
    ]
    counts, closed = [0] * len(chains), set()
    for price, _, owner in sorted(steps):
        cost = chains[owner].costs[0]
        if price < 0 and owner not in closed:
            if cost > budget:
                closed.add(owner)
            else:
                budget, counts[owner] = budget - cost, counts[owner] + 1
    return counts


def twin_grids(tensors: list[list[Candidate[Any]]], budget: float) -> list[int]:
    """Finds the lowest price of a byte within the budget by bisection; each tensor takes its cheapest option."""

    def at(option: Candidate[Any], price: float) -> tuple[float, float]:
        falls, cost = np.array([own.gains for own in option.chains]), option.chains[0].costs[0]
        bought = falls > price * cost
        return option.loss - falls[bought].sum(), option.nbytes + cost * bought.sum()

    high = 1 + max(option.loss for options in tensors for option in options)
    low, best = high * 2.0**-60, [int(np.argmin([option.nbytes for option in options])) for options in tensors]
    for _ in range(60):
        price = (low * high) ** 0.5
        ends = [[at(option, price) for option in options] for options in tensors]
        chosen = [int(np.argmin([loss + price * nbytes for loss, nbytes in own])) for own in ends]
        if sum(own[choice][1] for own, choice in zip(ends, chosen, strict=True)) <= budget:
            high, best = price, chosen
        else:
            low = price
    return best


def twin_price(curves: torch.Tensor, ladder: torch.Tensor, budget: float) -> float:
    """Finds the logarithm of the price at which the sum of the curves falls below the budget."""
    total = curves.sum(0).tolist()
    total = [min(total[: at + 1]) for at in range(len(total))]
    if total[0] < budget:
        return float(ladder[0])
    for at, (high, low) in enumerate(itertools.pairwise(total)):
        if low < budget:
            return float(ladder[at] * (ladder[at + 1] / ladder[at]) ** ((high - budget) / (high - low)))
    return float(ladder[-1])


# --- small instances --------------------------------------------------------------------------------------------------

WHOLE = st.integers(0, 40)
SETS = st.lists(st.lists(st.tuples(WHOLE, WHOLE), min_size=1, max_size=4), min_size=1, max_size=4)
CHAINS = st.lists(
    st.tuples(st.integers(1, 5), st.lists(st.integers(-2, 9), max_size=5)).map(
        lambda pair: chain(*((pair[0], gain) for gain in pair[1]))
    ),
    max_size=5,
)


@st.composite
def refined(draw: Any) -> list[list[Candidate[int]]]:
    """Tensors of two grids with a chain for each of two experts, whose steps have decreasing gains."""
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        cost, options = draw(st.integers(1, 4)), []
        for at in range(2):
            gains = [sorted(draw(st.lists(WHOLE, min_size=3, max_size=3)), reverse=True) for _ in range(2)]
            loss = sum(map(sum, gains)) + draw(WHOLE)
            own = [chain(*((cost, gain) for gain in row)) for row in gains]
            options.append(Candidate("compensated", at, draw(st.integers(1, 20)), loss, own))
        tensors.append(options)
    return tensors


def taken(choices: Any) -> list[tuple[int, float]]:
    """Bytes and losses of the candidates and of the steps taken in their chains."""
    bought = [(own, n) for one in choices for own, n in zip(one.candidate.chains, one.steps, strict=True)]
    found = [(one.candidate.nbytes, one.candidate.loss) for one in choices]
    return found + [(int(own.costs[:n].sum()), -float(own.gains[:n].sum())) for own, n in bought]


def cost(choices: Any) -> int:
    return sum(nbytes for nbytes, _ in taken(choices))


def loss(choices: Any) -> float:
    return sum(change for _, change in taken(choices))


def ends(candidate: Candidate[Any]) -> list[tuple[int, float]]:
    """Bytes and loss of a candidate with every number of steps of its chains."""
    counts = itertools.product(*(range(len(own.gains) + 1) for own in candidate.chains))
    found = []
    for steps in counts:
        taken = list(zip(candidate.chains, steps, strict=True))
        nbytes = candidate.nbytes + sum(int(own.costs[:n].sum()) for own, n in taken)
        found.append((nbytes, candidate.loss - sum(float(own.gains[:n].sum()) for own, n in taken)))
    return found


def exhaustive(tensors: list[list[Candidate[Any]]], budget: int) -> float:
    best = {0: 0.0}
    for candidates in tensors:
        every = [end for candidate in candidates for end in ends(candidate)]
        further: dict[int, float] = {}
        for (spent, so_far), (nbytes, more) in itertools.product(best.items(), every):
            if spent + nbytes <= budget:
                further[spent + nbytes] = min(so_far + more, further.get(spent + nbytes, math.inf))
        best = further
    return min(best.values(), default=math.inf)


def check(tensors: list[list[Candidate[Any]]], budget: int) -> float:
    """Within the budget, and no further from the optimum than the gain of the next step; returns the loss."""
    chains = [hull(candidates)[1] for candidates in tensors]
    room = budget - sum(min(one.nbytes for one in candidates) for candidates in tensors)
    if room < 0:
        with pytest.raises(ValueError, match="smallest candidates take"):
            allocate(tensors, budget)
        return math.inf
    choices = allocate(tensors, budget)
    assert cost(choices) <= budget
    bought = Steps(chains).above(room)
    left = room - sum(int(own.costs[:n].sum()) for own, n in zip(chains, bought, strict=True))
    price = max((own.prices[n] for own, n in zip(chains, bought, strict=True) if n < len(own.gains)), default=0.0)
    found = loss(choices)
    assert found <= exhaustive(tensors, budget) + price * left + 1e-9
    return found


@given(SETS, st.integers(0, 120), st.integers(0, 20))
@settings(deadline=None)
def test_sets_within_their_budget_are_near_the_best_and_more_bytes_lose_no_more(
    given_sets: Any, budget: int, more: int
) -> None:
    tensors = [points(*pairs) for pairs in given_sets]
    assert check(tensors, budget + more) <= check(tensors, budget) + 1e-9


@given(refined(), st.integers(0, 120), st.integers(0, 20))
@settings(deadline=None)
def test_sets_with_chains_give_the_same_results(tensors: Any, budget: int, more: int) -> None:
    assert check(tensors, budget + more) <= check(tensors, budget) + 1e-9


@given(refined(), st.integers(20, 120), st.integers(1, 9))
@settings(deadline=None)
def test_bytes_as_stored_stay_within_the_budget(tensors: Any, budget: int, unit: int) -> None:
    """Steps that are padded together cost more than their sum."""
    least = sum(min(one.nbytes for one in candidates) for candidates in tensors)

    def size(choices: Any) -> int:
        bare = sum(one.candidate.nbytes for one in choices)
        return bare + -(-(cost(choices) - bare) // unit) * unit

    if least <= budget:
        assert size(allocate(tensors, budget, size)) <= budget


@given(st.integers(0, 2**31), st.permutations(range(6)))
@settings(deadline=None)
def test_the_order_of_tensors_does_not_matter_where_no_prices_are_equal(seed: int, order: list[int]) -> None:
    rng = np.random.default_rng(seed)
    tensors = [
        points(*zip((10 + np.cumsum(rng.integers(1, 9, 4))).tolist(), rng.random(4), strict=True)) for _ in order
    ]
    budget = sum(one[0].nbytes for one in tensors) + int(rng.integers(0, 60))
    first, second = allocate(tensors, budget), allocate([tensors[at] for at in order], budget)
    assert [one.candidate for one in second] == [first[at].candidate for at in order]


@given(CHAINS, st.integers(-3, 60))
@settings(deadline=None)
def test_chains_are_bought_as_by_one_sorted_list(chains: list[Chain], budget: int) -> None:
    assert Steps(chains).within(budget).tolist() == twin_ranks(chains, budget)


@given(st.integers(0, 2**31))
@settings(deadline=None)
def test_sets_are_chosen_as_by_a_heap_of_steps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = [
        points(
            *zip(rng.integers(90, 130, 5).tolist(), (rng.random(5) * 10 ** rng.uniform(-1, 1)).tolist(), strict=True)
        )
        for _ in range(int(rng.integers(1, 9)))
    ]
    for budget in range(sum(min(one.nbytes for one in own) for own in tensors), 130 * len(tensors), 23):
        assert [one.candidate.specification for one in allocate(tensors, budget)] == twin_sizes(tensors, budget)


def grids(rng: Any, tensors: int, experts: int, steps: int) -> list[list[Candidate[int]]]:
    found = []
    for _ in range(tensors):
        falls = -np.sort(-rng.random((experts, steps))) * 0.2
        error, step = float(falls.sum()) + 0.5, int(rng.integers(5, 12))
        options = []
        for at, (nbytes, share) in enumerate([(110, float(rng.uniform(0.7, 0.99))), (100, 1.0)]):
            chains = [Chain(np.full(steps, step), row * share) for row in falls]
            options.append(Candidate("compensated", at, nbytes, error * share, chains))
        found.append(options)
    return found


def check_grids(tensors: list[list[Candidate[Any]]], budget: int) -> None:
    """The grids of one price, then the ranks of one list over all tensors."""
    found, expected = allocate(tensors, budget), twin_grids(tensors, budget)
    chosen = [options[at] for options, at in zip(tensors, expected, strict=True)]
    assert [one.candidate.specification for one in found] == [one.specification for one in chosen]
    ranks = twin_ranks([own for one in chosen for own in one.chains], budget - sum(one.nbytes for one in chosen))
    assert [int(n) for one in found for n in one.steps] == ranks


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_grids_are_chosen_as_by_the_bisection_of_a_price(seed: int) -> None:
    tensors = grids(np.random.default_rng(seed), 6, 2, 4)
    for budget in (600, 633, 650, 720, 800, 2000):
        check_grids(tensors, budget)


@given(st.integers(0, 2**31), st.floats(0.5, 100))
@settings(deadline=None)
def test_a_price_is_where_the_summed_curves_cross_the_budget(seed: int, share: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    ladder = 2.0 ** torch.arange(-6, 3, dtype=torch.float64)
    curves = torch.rand(3, len(ladder), generator=generator, dtype=torch.float64).sort(descending=True).values * 50
    budget = PricedBudget(share, ladder, {"up": Curves.of(curves)})
    assert budget.price("up", range(3)) == pytest.approx(twin_price(curves, ladder, share), rel=1e-9)
    # Booked bytes leave the budget, and curves of the stage are scaled by the error of the estimate.
    budget.record_bits("up", range(1), torch.tensor([1.0]))
    level = float(torch.log2(torch.tensor(budget._last, dtype=torch.float64))) + 6
    below = min(int(level), len(ladder) - 2)
    expected = float(torch.lerp(curves[0, below], curves[0, below + 1], level - below))
    assert budget.excess() is None
    assert budget.price("up", range(1, 3)) == pytest.approx(
        twin_price(curves[1:] / expected, ladder, share - 1.0), rel=1e-6
    )
    budget.record_bits("up", range(1, 3), torch.tensor([2.0, 3.0]))
    assert budget.excess() == pytest.approx(6 / share - 1)


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_matrices_of_one_wave_pay_one_price_wherever_they_are_solved(seed: int) -> None:
    """Copies of a budget that solve one matrix each leave the same budget as solving all in a row."""
    generator = torch.Generator().manual_seed(seed)
    ladder = 2.0 ** torch.arange(-6, 3, dtype=torch.float64)
    curves = {
        name: torch.rand(5, len(ladder), generator=generator, dtype=torch.float64).sort(descending=True).values * 50
        for name in ("up", "down")
    }
    found = {name: torch.rand(5, generator=generator, dtype=torch.float64) * 50 for name in curves}
    budget = PricedBudget(150.0, ladder, {name: Curves.of(own) for name, own in curves.items()})

    def solve(own: PricedBudget, matrix: int) -> list[float]:
        one, paid = range(matrix, matrix + 1), []
        for name, bits in found.items():
            paid.append(own.price(name, one))
            own.record_bits(name, one, bits[matrix : matrix + 1])
        return paid

    solve(budget, 0)
    budget.share(range(1, 4))
    other = deepcopy(budget)
    paid = [solve(budget, matrix) for matrix in (1, 2, 3)]
    copies = {matrix: deepcopy(other) for matrix in (1, 2, 3)}
    assert [solve(copies[matrix], matrix) for matrix in (3, 1, 2)] == paid and len({*paid[0], *paid[1], *paid[2]}) == 1
    for matrix, own in copies.items():
        other.take(one := range(matrix, matrix + 1), own.taken(one))
    assert other.excess() is None
    for own in (budget, other):
        own.share(None)
    assert solve(other, 4) == solve(budget, 4) and other.excess() == budget.excess()


@pytest.mark.parametrize(("groups", "sizes"), [(0, []), (1, [1]), (2, [1, 1]), (4, [1, 2, 1]), (9, [1, 7, 1]),
                                               (128, [1, 7, 56, 63, 1])])  # fmt: skip
def test_waves(groups: int, sizes: list[int]) -> None:
    every = [range(at, at + 2) for at in range(0, 2 * groups, 2)]
    waves = waves_of(every)
    assert [len(wave) for wave in waves] == sizes and [one for wave in waves for one in wave] == every


def test_degenerate_sets() -> None:
    def corners(*pairs: tuple[int, float]) -> list[int]:
        return [one.specification for one in hull(points(*pairs))[0]]

    assert allocate([], 0) == []
    with pytest.raises(ValueError, match="has no candidates"):
        allocate([[]], 10)
    with pytest.raises(ValueError, match="take 3 bytes, but the budget is 2"):
        allocate([points((3, 1.0))], 2)
    # Of equal candidates the first is taken; a larger one without a gain never.
    assert allocate([points((3, 1.0), (3, 1.0), (4, 1.0))], 9)[0].candidate.specification == 0
    # The hull goes straight to the last.
    series = points((100, 5.0), (110, 6.0), (120, 4.9), (130, 1.0))
    assert [allocate([series], budget)[0].candidate.specification for budget in (125, 130)] == [0, 3]
    assert corners((1, 3.0), (2, 2.0), (3, 1.0)) == [0, 2]
    assert corners((1, math.inf), (2, math.inf), (3, 1.0)) == [0, 2]
    assert allocate([points((1, math.nan))], 1)[0].candidate.nbytes == 1
    empty = Chain(np.empty(0, np.int64), np.empty(0))
    assert allocate([[Candidate("compensated", None, 5, 1.0, [empty])]], 9)[0].steps.tolist() == [0]


def test_chains_are_bought_where_the_loss_falls_most() -> None:
    chains = [chain((1, 9.0), (1, 4.0), (1, 1.0)), chain((2, 8.0), (2, 7.0), (2, 0.0)), chain((60, 100.0))]
    bought = {budget: Steps(chains).within(budget).tolist() for budget in (0, 5, 6, 1000)}
    assert bought == {0: [0, 0, 0], 5: [3, 1, 0], 6: [2, 2, 0], 1000: [3, 2, 1]}
    # A later step that is worth more than an earlier one is bought with it.
    assert Steps([chain((1, 1.0), (1, 5.0))]).within(1).tolist() == [1]
    # Equal prices: the earlier step first, then the earlier chain.
    assert Steps([chain((1, 2.0), (1, 2.0)), chain((1, 2.0))]).within(2).tolist() == [1, 1]


def test_importance() -> None:
    assert visits(2, 8) == 0.25 and visits(1, 0) == 1
    assert shares([0, 2]).tolist() == [0.25, 0.75]
    squares = np.array([1.0, 3.0])
    assert relative(squares).tolist() == [0.25, 0.25] and relative(squares, squares).tolist() == [1.0, 1.0]
    found = curvatures(torch.tensor([0.0, math.nan, 4.0, math.inf]))
    torch.testing.assert_close(found, torch.tensor([1e-3, 1e-3, 4.0, 1e-3]))
    assert curvatures(torch.zeros(2)).tolist() == [1.0, 1.0]
    assert evenness(torch.ones(4, dtype=torch.float64)) == pytest.approx(1)
    assert evenness(torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)) == pytest.approx(0.25)


# --- trained models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=MODELS, ids=lambda path: path.name)
def checkpoint(request: Any) -> Checkpoint:
    return Checkpoint.open(request.param)


def budgets(least: int, most: int) -> list[int]:
    return [least + round((most - least) * share) for share in (0, 0.01, 0.03, 0.1, 0.2, 0.37, 0.5, 0.72, 0.9, 1)]


def test_group_sizes_of_a_model_match_the_heap(checkpoint: Checkpoint) -> None:
    roles = {"experts": 4, "attention": 8}
    sets = [one.candidates for one in proposals(checkpoint, describe(checkpoint), roles)]
    least, most = (sum(pick(one.nbytes for one in own) for own in sets) for pick in (min, max))
    for budget in budgets(least, most):
        assert [one.candidate for one in allocate(sets, budget)] == [
            own[at] for own, at in zip(sets, twin_sizes(sets, budget), strict=True)
        ]


@pytest.mark.parametrize("counted", [False, True])
def test_grids_and_ranks_of_a_model_match_the_price_and_the_list(checkpoint: Checkpoint, counted: bool) -> None:
    model = describe(checkpoint)
    rng, counts = np.random.default_rng(0), {}
    if counted:
        counts = {layer.name: rng.integers(0, 500, layer.experts).tolist() for layer in model.layers}
    specs = [GroupSpec(3, 64), GroupSpec(3, 64, True)]
    planner = Planner(specs, LeastSquares(), 3, torch.device("cpu"), counts, 2.0)
    sources = [source for source in find_sources(model) if ".0." in source.name]
    tensors = [[planner._propose(source, spec, 8) for spec in specs] for source in sources]
    least = sum(min(one.nbytes for one in own) for own in tensors)
    for budget in budgets(least, round(least * 1.4)):
        check_grids(tensors, budget)
