import numpy as np
import pytest
import torch

from moepack import InvalidTensorError, _core
from moepack.solvers.kmeans import kmeans, nearest


def oracle(values, weights, clusters):
    """Minimum weighted error of a row: dynamic programming over every split, in float64."""
    order = np.argsort(values, kind="stable")
    x, w = values[order].astype(float), weights[order].astype(float)
    count = len(x)
    cost = np.zeros((count + 1, count + 1))
    for start in range(count):
        for end in range(start + 1, count + 1):
            part, share = x[start:end], w[start:end]
            if share.sum():
                cost[start, end] = share @ (part - share @ part / share.sum()) ** 2
    best = cost[0]
    for _ in range(clusters - 1):
        best = np.minimum(best, [np.min(best[: end + 1] + cost[: end + 1, end]) for end in range(count + 1)])
    return best[count]


@pytest.mark.parametrize("clusters", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("kind", ["normal", "bfloat16", "outliers", "two-sided"])
def test_the_error_is_the_least(clusters, kind):
    rng = np.random.default_rng(clusters)
    values = rng.standard_normal((3, 60)).astype(np.float32)
    if kind == "bfloat16":
        values = torch.from_numpy(values).bfloat16().float().numpy()
    if kind == "outliers":
        values[:, 7] *= 1e5
    if kind == "two-sided":
        values = np.sign(values) * (3 + 0.1 * values)
    weights = rng.gamma(0.5, size=(1, 60)).astype(np.float32)
    found = kmeans(torch.from_numpy(values)[None], clusters, torch.from_numpy(weights))
    for row in range(3):
        expected = oracle(values[row], weights[0], clusters)
        scale = weights[0] @ values[row].astype(float) ** 2
        assert abs(float(found.errors[0, row]) - expected) <= 1e-12 * scale + 1e-9 * expected
    rebuilt = found.values()[0].double()
    errors = (torch.from_numpy(weights) * (torch.from_numpy(values).double() - rebuilt) ** 2).sum(-1)
    torch.testing.assert_close(errors, found.errors[0], rtol=1e-4, atol=1e-4)


def test_ties_of_a_lloyd_iteration_are_fixed_points():
    """The optimum cannot be improved by moving centroids or values."""
    values = torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0))
    weights = torch.rand(2, 300, generator=torch.Generator().manual_seed(1))
    found = kmeans(values, 8, weights)
    assert torch.equal(nearest(values, found.centroids), found.codes)
    one_hot = torch.nn.functional.one_hot(found.codes.long(), 8).float() * weights[:, None, :, None]
    means = (one_hot * values[..., None]).sum(2) / one_hot.sum(2)
    torch.testing.assert_close(means, found.centroids, rtol=1e-4, atol=1e-5)


def test_constant_rows_few_values_and_weightless_columns():
    values = torch.tensor([[1.0, 1, 1, 1], [0, 2, 0, 2], [0, 1, 2, 9]])
    found = kmeans(values, 4, torch.tensor([1.0, 1, 1, 0]))
    torch.testing.assert_close(found.values()[:2], values[:2])
    assert found.centroids[0].tolist() == [1, 1, 1, 1]
    assert found.codes[2].tolist() == [0, 1, 2, 2]
    assert torch.equal(nearest(values, found.centroids), found.codes)
    unweighted = kmeans(values, 4, torch.zeros(4))
    assert torch.equal(unweighted.values(), values)


def test_bad_values_are_typed_errors():
    values = torch.zeros(1, 2, 3)
    values[0, 1, 2] = float("nan")
    with pytest.raises(InvalidTensorError, match="tensor 'w': holds nan in row 1, column 2"):
        kmeans(values, 4, name="w")
    with pytest.raises(InvalidTensorError, match="importance"):
        kmeans(torch.zeros(1, 2, 3), 4, torch.tensor([[1.0, -1.0, 1.0]]))
    with pytest.raises(ValueError, match="weights"):
        kmeans(torch.zeros(1, 2, 3), 4, torch.ones(3))
    with pytest.raises(ValueError, match="columns"):
        kmeans(torch.zeros(2, 0), 4)
    with pytest.raises(ValueError, match="not 17"):
        kmeans(torch.zeros(1, 3), 17)
    with pytest.raises(ValueError, match="C-contiguous"):
        _core.kmeans(np.zeros((4, 4), np.float32)[:, ::2], 2)


def test_nearest_handles_repeated_centroids():
    centroids = torch.tensor([[0.0, 1.0, 1.0, 1.0], [5.0, 5.0, 5.0, 5.0]])
    values = torch.tensor([[0.5, 0.6, 7.0], [1.0, 5.0, 9.0]])
    assert nearest(values, centroids).tolist() == [[0, 1, 1], [0, 0, 0]]
