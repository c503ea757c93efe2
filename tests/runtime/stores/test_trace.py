"""Routing traces: recorded content, and hit rates of policies."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import moepack
import runtime_support as support
from moepack.cli import app
from moepack.modules.experts import PackedExperts
from moepack.stores.streaming.trace import POLICIES, Trace, hit_rate, recorded


def made(tokens: int, layers: int, experts: int, seed: int = 0) -> Trace:
    random = np.random.default_rng(seed)
    likely = random.dirichlet(np.full(experts, 0.5), layers)
    chosen = [[random.choice(experts, 2, False, own) for own in likely] for _ in range(tokens)]
    return Trace(np.array(chosen, np.int64), experts)


def naive_belady(requests: list[int], capacity: int) -> int:
    """Evicts the entry whose next use is last, by search."""
    resident, found = set[int](), 0
    for time, request in enumerate(requests):
        if request in resident:
            found += 1
            continue
        if len(resident) == capacity:
            rest = requests[time:]
            resident.remove(max(resident, key=lambda one: rest.index(one) if one in rest else len(rest)))
        resident.add(request)
    return found


def test_the_best_policy_is_the_best_and_caches_of_everything_miss_once() -> None:
    trace = made(60, 3, 8)
    for capacity in (1, 3, 8, 20):
        rates = {policy: hit_rate(trace, policy, capacity) for policy in POLICIES}
        assert rates["belady"] == naive_belady(trace.requests, capacity) / len(trace.requests)
        assert max(rates.values()) == rates["belady"]
    distinct = len(set(trace.requests))
    assert {hit_rate(trace, policy, 24) for policy in POLICIES} == {1 - distinct / len(trace.requests)}


def test_policies_differ_as_expected() -> None:
    loop = Trace(np.arange(6).reshape(-1, 1, 1).repeat(1, 1)[list(range(6)) * 5].astype(np.int64), 6)
    assert hit_rate(loop, "lru", 5) == 0 < hit_rate(loop, "belady", 5)
    often = Trace(np.array([0, 0, 0, *(1 + i % 5 for i in range(10)), 0]).reshape(-1, 1, 1), 6)
    assert hit_rate(often, "lfu", 3) > hit_rate(often, "lru", 3)


def test_a_model_is_recorded_saved_and_replayed(packed: Path, tmp_path: Path) -> None:
    model, seen = moepack.load(packed, dtype="float32"), []
    layers = [module for module in model.modules() if isinstance(module, PackedExperts)]
    layers[1].register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    with recorded(model) as found:
        support.logits(model)
        support.logits(model, seed=1)
    support.logits(model, seed=2)
    trace = found()
    assert np.array_equal(trace.chosen[:, 1], torch.cat(seen[:2]).numpy()) and trace.experts == layers[0].num_experts
    trace.save(tmp_path / "trace.npz")
    again = Trace.open(tmp_path / "trace.npz")
    assert again.requests == trace.requests and again.size == trace.size
    shown = CliRunner().invoke(app, ["trace", str(tmp_path / "trace.npz")])
    assert shown.exit_code == 0 and all(policy.split()[0] in shown.output for policy in POLICIES)
    np.save(tmp_path / "array.npy", np.zeros(3))
    whole = (tmp_path / "trace.npz").read_bytes()
    flipped = whole[:60] + bytes(255 - byte for byte in whole[60:80]) + whole[80:]
    for damaged in (b"no trace", b"PK\x03\x04 no archive", whole[:-40], flipped, (tmp_path / "array.npy").read_bytes()):
        (tmp_path / "trace.npz").write_bytes(damaged)
        with pytest.raises(moepack.LoadError, match="is not a routing trace"):
            Trace.open(tmp_path / "trace.npz")
    for chosen, experts in product((np.zeros((2, 2)), np.full((1, 1, 1), 9)), (4,)):
        np.savez(tmp_path / "other.npz", chosen=chosen, experts=experts)
        with pytest.raises(moepack.LoadError, match="is not a routing trace"):
            Trace.open(tmp_path / "other.npz")


def test_the_command_reads_a_text(packed: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("A text that nobody wrote, some words long.\n" * 60)
    shown = CliRunner().invoke(app, ["trace", str(packed), "--text", str(text), "--chars", "2000"])
    again = CliRunner().invoke(
        app, ["trace", str(packed), "--text", str(text), "--chars", "2000", "--dtype", "float16"]
    )
    assert again.exit_code == 0 and "per token" in again.output
    assert shown.exit_code == 0 and "per token" in shown.output and "belady" in shown.output
    assert CliRunner().invoke(app, ["trace", str(packed)]).exit_code == 2
