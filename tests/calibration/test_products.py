"""Products that calibration computes once or in part: Gram matrices, kept activations, early ends of passes."""

import threading

import pytest
import torch

from moepack.calibration.activations import Activations
from moepack.calibration.moments import BLOCK, Gram, Tokens, expert_moments
from moepack.solvers.products import ROWS, WORK, fast_products, filled, product

CPU = torch.device("cpu")


@pytest.mark.parametrize("columns", [0, 1, 7, BLOCK, 2 * BLOCK + 5])
def test_blocks_give_the_whole_symmetric_product(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    pieces = [torch.randn(count, columns, generator=generator) for count in (3, 0, 20)]
    gram, found = Gram(columns, CPU), torch.empty(columns, columns)
    for piece in pieces:
        gram.add(piece)
    gram.write(found)
    whole = torch.cat(pieces).double()
    torch.testing.assert_close(found.double(), whole.T @ whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found, found.T)


@pytest.mark.parametrize("rows", [0, 1, ROWS - 1, ROWS, ROWS + 1, 3 * ROWS + 7])
def test_filled_up_rows_give_the_same_products(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moepack.solvers.products.WORK", 1)
    x, weights = torch.randn(rows, 12), torch.randn(5, 12)
    torch.testing.assert_close(product(x, weights), x @ weights.T, rtol=1e-5, atol=1e-5)
    full = filled(x, 1)
    assert torch.equal(full[:rows], x) and not full[rows:].any()
    assert len(full) % ROWS == 0
    assert filled(x, 0) is x, "small products keep their shape"


def test_moments_without_drift_are_the_same_hessians() -> None:
    x, before, a = torch.randn(40, 6), torch.randn(40, 6), torch.rand(40)
    whole = expert_moments([[Tokens(x, before, a)]], 6, CPU)
    alone = expert_moments([[Tokens(x, before, a)]], 6, CPU, drift=False)
    assert alone.drift is None and torch.equal(alone.hessians, whole.hessians)
    assert whole.drift is not None
    torch.testing.assert_close(whole.drift[0], (before - x).T @ (x * a[:, None]), rtol=1e-4, atol=1e-4)
    still = expert_moments([[Tokens(x, x, a)]], 6, CPU).drift
    assert still is not None and not still.any()


def values_of(rows: torch.Tensor) -> torch.Tensor:
    """Return distinguishable activations of tokens."""
    return torch.stack([rows.float(), -rows.float()], 1)


@pytest.mark.parametrize("wanted", [[3, 5, 9], [3, 4, 5, 9, 11], [5], [0, 1], [20, 21], []])
@pytest.mark.parametrize("pieces", [[[3, 5, 9]], [[3, 5], [9, 20]], []])
def test_activations_are_those_computed_anew(wanted: list[int], pieces: list[list[int]]) -> None:
    kept, computed = Activations(), list[int]()

    def compute(rows: torch.Tensor) -> torch.Tensor:
        computed.extend(rows.tolist())
        return values_of(rows)

    for piece in pieces:
        kept.keep(1, 0, torch.tensor(piece), values_of(torch.tensor(piece)))
    rows = torch.tensor(wanted, dtype=torch.int64)
    assert torch.equal(kept.of(1, 0, rows, compute), values_of(rows))
    assert computed == [row for row in wanted if row not in {each for piece in pieces for each in piece}]
    assert torch.equal(kept.of(0, 0, rows, compute), values_of(rows)), "other streams keep their own"


def test_activations_stay_within_their_budget() -> None:
    kept, rows = Activations(room=100), torch.arange(10)
    kept.keep(0, 0, rows, values_of(rows))
    assert kept.room == 20
    kept.keep(0, 0, rows, values_of(rows))
    kept.keep(0, 1, rows, values_of(rows))
    assert kept.room == 20
    assert not kept.of(0, 1, rows, lambda rows: torch.zeros(len(rows), 2)).any(), "computed anew"
    assert torch.equal(kept.of(0, 0, rows, lambda rows: torch.zeros(len(rows), 2)), values_of(rows))


@pytest.mark.skipif(not hasattr(torch.backends.mkldnn, "matmul"), reason="an older torch keeps its products")
def test_the_setting_of_products_is_restored_after_the_last_user() -> None:
    setting = torch.backends.mkldnn.matmul
    before, entered, leave = setting.fp32_precision, threading.Event(), threading.Event()

    @fast_products(WORK)
    def other() -> None:
        entered.set()
        leave.wait(60)

    thread = threading.Thread(target=other)
    with fast_products(WORK):
        thread.start()
        assert entered.wait(60)
    assert setting.fp32_precision == "bf16"
    leave.set()
    thread.join()
    assert setting.fp32_precision == before
    with fast_products(WORK - 1):
        assert setting.fp32_precision == before
    with pytest.raises(ZeroDivisionError), fast_products(WORK):
        _ = 1 / 0
    assert setting.fp32_precision == before
