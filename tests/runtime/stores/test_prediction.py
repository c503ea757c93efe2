"""Predictors of the next layer's experts: fitted, stored, read ahead; outputs change only on request."""

import json
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import moepack
from moepack.cli import app
from moepack.format import PackedDirectory
from moepack.format.hub import PREDICTORS
from moepack.methods.finequant import FineQuant
from moepack.methods.floe import Floe
from moepack.methods.floe.predictors import Pair, fitted, recalled
from moepack.modules.experts import SparseExperts
from moepack.modules.foresight import foresee
from moepack.pipeline import compress
from moepack.stores.streaming import statistics_of
from moepack.stores.streaming.prediction import Predictor, predictors_of, serialized
from oracle import channels as oracle
from runtime_support import inputs, logits


def pair(kind: str, tokens: int = 4000) -> tuple[Pair, torch.Tensor]:
    """Tokens whose experts follow from the router, from a linear map, or from neither, and the router."""
    random = torch.Generator().manual_seed(0)
    x, router = (torch.randn(*shape, generator=random) for shape in ((tokens, 16), (8, 16)))
    by = {
        "router": x @ router.T,
        "linear": x @ torch.randn(16, 8, generator=random),
        "network": (x @ torch.randn(16, 8, generator=random)).abs(),
    }[kind]
    return Pair(x, by.topk(2).indices.int(), by if kind == "linear" else None), router


@pytest.mark.parametrize("kind", ["router", "linear", "network"])
def test_the_map_that_recalls_most_of_unseen_tokens_is_kept(kind: str) -> None:
    known, router = pair(kind)
    predictor, name, recall = fitted(known, router, 8)
    assert name == kind and recall > {"router": 0.999, "linear": 0.98, "network": 0.65}[kind]
    _, held = known.split()
    assert recall == recalled(predictor, held) and len(held.inputs) == 500
    again, _, _ = fitted(known, router, 8)
    assert torch.equal(again.direct, predictor.direct)


def test_tokens_without_experts_and_layers_without_routers_are_fitted() -> None:
    known, _ = pair("linear", tokens=64)
    known.chosen[::2] = -1
    predictor, name, recall = fitted(Pair(known.inputs, known.chosen), None, 8)
    assert name in ("linear", "network") and 0 <= recall <= 1 and torch.isfinite(predictor.direct).all()
    assert recalled(predictor, Pair(known.inputs[:0], known.chosen[:0])) == 0


@pytest.fixture(scope="module", params=["refined", "paper"])
def directory(
    request: pytest.FixtureRequest, mixtral: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("prediction")
    settings = {"samples": 6, "sequence_length": 64, "dense_layers": 0, "paper_form": request.param == "paper"}
    method = Floe(str(text), **settings)
    method.files = lambda: {PREDICTORS: serialized({layer: wrong(experts) for layer, experts in layers.items()})}  # type: ignore[method-assign]
    compress(mixtral, folder / "right", method=Floe(str(text), **settings))
    model = moepack.load(folder / "right")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SparseExperts)}
    compress(mixtral, folder / "wrong", method=method)
    return folder


def wrong(layer: SparseExperts) -> Predictor:
    """A random predictor."""
    experts, _, columns = layer.shapes["up_proj"]
    random = torch.Generator().manual_seed(1)
    return Predictor(
        *(torch.randn(*shape, generator=random) for shape in ((experts, columns), (3, columns), (experts, 3)))
    )


def load(directory: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", moepack.MoepackWarning)
        return moepack.load(directory, dtype="float32", mode="exact", **options)


def test_recall_is_noted_and_predictors_are_part_of_the_directory(directory: Path, tmp_path: Path) -> None:
    opened = PackedDirectory.open(directory / "right")
    first, second = (record.details for record in opened.manifest.packed().values() if record.kind == "channels")
    assert "recall" not in first and second["recall"]["by"] in ("router", "linear", "network")
    assert 0 <= second["recall"]["experts"] <= 1 and 0.2 < second["recall"]["channels"] <= 1
    assert "of experts predicted" in CliRunner().invoke(app, ["inspect", str(directory / "right")]).output
    assert PREDICTORS in PackedDirectory.open(directory / "wrong").manifest.files
    assert moepack.verify(directory / "wrong").ok
    damaged = tmp_path / "damaged"
    shutil.copytree(directory / "wrong", damaged)
    data = bytearray((damaged / PREDICTORS).read_bytes())
    data[-1] ^= 1
    (damaged / PREDICTORS).write_bytes(data)
    assert [fault.file for fault in moepack.verify(damaged).faults] == [PREDICTORS]
    (damaged / PREDICTORS).write_bytes(data[:-1])
    with pytest.raises(moepack.CorruptionError, match="truncated"):
        load(damaged, host_memory="1GB")
    (damaged / PREDICTORS).write_bytes(
        serialized({"layer": Predictor(torch.ones(3, 4), torch.ones(2, 5), torch.ones(3, 2))})
    )
    with pytest.raises(moepack.CorruptionError, match="is not a valid predictor"):
        load(damaged, host_memory="1GB")
    known = [*predictors_of(directory / "wrong")]
    (damaged / PREDICTORS).write_bytes(serialized(dict.fromkeys(known, Predictor(torch.ones(3, 4)))))
    with pytest.raises(moepack.CorruptionError, match="belongs to another model"):
        load(damaged, host_memory="1GB")


@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_guesses_change_no_output(directory: Path, kind: str) -> None:
    expected, model = load(directory / kind), load(directory / kind, host_memory=memory(directory))
    ids = inputs(model, batch=1, tokens=1)["input_ids"]
    generated = [each.generate(ids, max_new_tokens=12, do_sample=False) for each in (model, expected)]
    assert torch.equal(*generated)
    counts = statistics_of(model)
    assert counts is not None and counts.guessed and 0 <= counts.right <= min(counts.guessed, counts.wanted)
    states = [logits(model, batch=1, tokens=2, seed=seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: logits(model, batch=1, tokens=2, seed=seed), range(8)))
    assert all(torch.equal(*each) for each in zip(found, states, strict=True))
    silent = load(directory / kind, host_memory=memory(directory), guess=False)
    silent.generate(ids, max_new_tokens=12, do_sample=False)
    counts = statistics_of(silent)
    assert counts is not None and not counts.guessed


def memory(directory: Path) -> int:
    """A budget that does not hold all records."""
    model = load(directory / "right")
    records = sum(
        module.get_buffer(module.projections[-1]).nbytes
        for module in model.modules()
        if isinstance(module, SparseExperts)
    )
    total: int = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return total - records + max(records // 4, 16 * 16384 + 65536)


def test_an_approximation_selects_by_the_input_of_the_layer_before(
    directory: Path, mixtral: Path, tmp_path: Path
) -> None:
    exact, model = load(directory / "right"), load(directory / "right", approximate=True)
    first, second = (module for module in model.modules() if isinstance(module, SparseExperts))
    seen: list[Any] = []
    for module in (first, second):
        module.register_forward_hook(lambda _, given, found: seen.append((*given, found)))
    changed = logits(model)
    assert not torch.allclose(changed, logits(exact), atol=1e-6)
    before, (x, index, weights, found) = seen[0][0], seen[1]
    *deciders, records = (torch.from_numpy(second.matrix(name).dequantize()) for name in second.projections)
    thresholds = torch.from_numpy(second.matrix(second.projections[-1]).parameters("thresholds"))
    if len(deciders) == 1:
        expected, _ = oracle.layer(deciders[0], records, thresholds, x, index, weights, before)
    else:
        gate, up, down = deciders
        expected, _ = oracle.refined_layer((gate, up, down), records, thresholds, x, index, weights, before)
    torch.testing.assert_close(found, expected.float(), rtol=1e-3, atol=1e-5)
    streamed = load(directory / "right", approximate=True, host_memory=memory(directory))
    torch.testing.assert_close(logits(streamed), changed, rtol=1e-5, atol=1e-5)
    text = tmp_path / "text.txt"
    text.write_text("A text that is long enough to be measured. " * 60)
    commands = ["eval", str(directory / "right"), "--text", str(text), "--json"]
    losses = [
        json.loads(CliRunner().invoke(app, [*commands, *more]).output)["loss"] for more in ([], ["--approximate"])
    ]
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 1


def test_whole_experts_are_guessed_by_routers(mixtral: Path, tmp_path: Path) -> None:
    compress(mixtral, tmp_path / "out", method=FineQuant(bits=4))
    with pytest.raises(moepack.LoadError, match="approximate requires experts"):
        load(tmp_path / "out", approximate=True)
    expected, model = load(tmp_path / "out"), load(tmp_path / "out", host_memory="1GB")
    ids = inputs(model, batch=1, tokens=1)["input_ids"]
    generated = [each.generate(ids, max_new_tokens=12, do_sample=False) for each in (model, expected)]
    assert torch.equal(*generated)
    counts = statistics_of(model)
    assert counts is not None and counts.guessed == counts.wanted > 0
    foresee(expected, tmp_path / "out")
    assert torch.equal(logits(expected), logits(load(tmp_path / "out")))
