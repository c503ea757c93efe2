"""Shared jobs on a simulated cluster of copies in this process: identical bytes for any task order, rejections, faults.

`test_ray.py` uses Ray's own processes, if Ray is installed.
"""

import os
import pickle
import shutil
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import moepack
import packed_support as support
import tiny_models
from fault_support import every_method
from faults.test_disk_errors import failing
from hub_support import cached, serving, use
from moepack.checkpoint import Checkpoint
from moepack.checkpoint.remote import open_remote
from moepack.errors import ClusterError, DeviceError, DiskError
from moepack.format.side import RECIPE
from moepack.methods import FineQuant, Method, create
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.distributed import cluster, executor, probe
from moepack.pipeline.distributed import remote as tasks


class Copies:
    """A cluster whose tasks see only copies from the time of submission, and run in reverse order."""

    def __init__(self, address: str, threads: int, gpus: int = 0) -> None:
        self.slots, self.most, self.handed_out = 2, 0, 0
        self.waiting, self.done = dict[int, Callable[[], Any]](), dict[int, Any]()

    def check(self, stamps: Any) -> None:
        assert all(Path(path).is_absolute() for path in stamps)

    def share(self, value: Any) -> Any:
        return deepcopy(value)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> int:
        self.handed_out += 1
        self.waiting[self.handed_out] = lambda: work(torch.get_num_threads(), *deepcopy(arguments))
        self.most = max(self.most, len(self.waiting) + len(self.done))
        return self.handed_out

    def result(self, task: int) -> Any:
        while self.waiting:
            number, work = self.waiting.popitem()
            self.done[number] = deepcopy(work())
        return self.done.pop(task)

    def close(self) -> None:
        pass


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Copies]:
    """The connected clusters."""
    made: list[Copies] = []
    monkeypatch.setattr(executor, "Cluster", lambda *given: made.append(Copies(*given)) or made[-1])
    monkeypatch.setattr(tasks, "_layers", lambda shared: shared)
    monkeypatch.setattr(tasks, "_run", lambda shared: shared)
    monkeypatch.setattr(tasks, "_plans", lambda shared: shared)
    return made


def methods(place: Path) -> dict[str, Method]:
    found = every_method(place)
    seen = {"calibration": str(place / "text.txt"), "samples": 4, "sequence_length": 32, "group": 2}
    found["auto"] = create("auto", calibration="none")
    one = {**seen, "group": 1}  # four groups of a layer, in three waves
    found["auto with a text"] = create("auto", bits_per_weight=3.0, prefer="quality", **one)
    found["auto with a text, mixed"] = create("auto", bits_per_weight=4.2, prefer="speed", **one)
    found["auto with bits by name"] = create("auto", bits_per_weight=4.0, bits="experts.{0..1}=6", **one)
    found["rate with a text"] = create("rate", bits_per_weight=2.0, **one)
    found["qmoe at a rate"] = create("qmoe", bits_per_weight=1.0, **one)
    found["qmoe"] = create("qmoe", **seen, dense_bits=4)
    found["codequant"] = create("codequant", **seen, rotation="random", activation_bits=8)
    return found


@pytest.mark.parametrize(
    "name",
    [
        *("auto", "auto with a text, mixed", "rate with a text"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("auto with a text", "auto with bits by name")),
        *("codequant", "finequant", "finequant with a text", "floe", "milo", "qmoe", "qmoe at a rate"),
    ],
)
def test_shared_work_gives_the_same_bytes(name: str, mixtral: Path, tmp_path: Path, copies: list[Copies]) -> None:
    for out, address in (("alone", None), ("shared", "anywhere")):
        method = methods(tmp_path)[name]
        report = moepack.compress(mixtral, tmp_path / out, method=method, ray=address)
    assert support.contents(tmp_path / "shared") == support.contents(tmp_path / "alone")
    assert copies[0].most <= 2 * copies[0].slots and report.weights_per_second > 0


def test_methods_of_a_job_may_differ(qwen3_moe: Path, tmp_path: Path, copies: list[Copies]) -> None:
    """One projection is known to the model's run before the others are solved."""
    for out, address in (("alone", None), ("shared", "anywhere")):
        others = {"model.layers.1.mlp.experts.down_proj": FineQuant(4)}
        moepack.compress(qwen3_moe, tmp_path / out, method=methods(tmp_path)["qmoe"], others=others, ray=address)
    assert support.contents(tmp_path / "shared") == support.contents(tmp_path / "alone")


@pytest.mark.parametrize("name", ["auto", pytest.param("auto with a text", marks=pytest.mark.slow), "qmoe"])
def test_a_full_disk_keeps_finished_work(name: str, mixtral: Path, tmp_path: Path, copies: list[Copies]) -> None:
    """The driver writes: rejections equal those of a local run, and each kind of run can continue the other."""
    out = tmp_path / "out"
    with failing("replace", 4), pytest.raises(DiskError):
        moepack.compress(mixtral, out, method=methods(tmp_path)[name], ray="anywhere")
    assert (tmp_path / "out.partial" / "journal.jsonl").exists()
    report = moepack.compress(mixtral, out, method=methods(tmp_path)[name], ray="anywhere")
    assert report.resumed_weights > 0
    moepack.compress(mixtral, tmp_path / "alone", method=methods(tmp_path)[name])
    assert support.contents(out) == support.contents(tmp_path / "alone")


def test_devices_that_a_cluster_cannot_provide_are_refused(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="--device must be cpu or cuda, not cuda:1"):
        moepack.compress(mixtral, tmp_path / "out", method="milo", device="cuda:1", ray="anywhere")
    (tmp_path / "text.txt").write_text("A text of some words. " * 99)
    with pytest.raises(DeviceError, match="run on a GPU of this machine, which has none"):
        text = str(tmp_path / "text.txt")
        moepack.compress(mixtral, tmp_path / "out", method="qmoe", calibration=text, device="cuda", ray="anywhere")
    assert not (tmp_path / "out.partial").exists()


class Resources:
    """Stands in for the module `ray`: records what tasks ask for."""

    def __init__(self, *nodes: dict[str, float]) -> None:
        self.alive = [{"Alive": True, "Resources": node} for node in nodes]
        self.asked: list[dict[str, Any]] = []

    def is_initialized(self) -> bool:
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return self.alive

    def remote(self, **asked: Any) -> Callable[..., Any]:
        self.asked.append(asked)
        return lambda work: SimpleNamespace(remote=lambda *_: len(self.asked))


def test_tasks_ask_for_the_gpus_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = Resources({"CPU": 8.0}, {"CPU": 8.0, "GPU": 1.0}, {"CPU": 9.0, "GPU": 4.0})
    monkeypatch.setitem(sys.modules, "ray", ray)
    on_cores, on_gpus = (cluster.Cluster("anywhere", 4, gpus) for gpus in (0, 1))
    assert (on_cores.slots, on_gpus.slots) == (6, 3)
    for each in (on_cores, on_gpus):
        each.submit(tasks.pack_tensor)
    assert [(each["num_cpus"], each["num_gpus"]) for each in ray.asked] == [(4, 0), (4, 1)]
    ray.alive = ray.alive[:1]
    with pytest.raises(ClusterError, match="no node has the 4 cores and the GPU that a task takes"):
        cluster.Cluster("anywhere", 4, 1)


def test_a_method_on_gpus_asks_for_them(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(executor, "Cluster", lambda *given: asked.append(given) or Copies(*given))
    for method in (create("milo"), create("milo", device="cuda")):
        executor.RayExecutor("anywhere", Checkpoint.open(mixtral.absolute()), Assignment(method))
    assert [gpus for *_, gpus in asked] == [0, 1]


def test_without_ray_the_extra_is_named(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match=r"pip install 'moepack\[ray\]'"):
        moepack.compress(mixtral, tmp_path / "out", method=Ternary(), ray="local")
    assert list(tmp_path.iterdir()) == []


def test_nodes_are_looked_at(mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = os.stat(file := mixtral / "model.safetensors")
    stamp = f"{status.st_size} {status.st_mtime_ns} {status.st_ino}"
    found = probe.look({str(file): stamp})
    cluster._refuse(found)
    assert found.version == moepack.__version__ and found.processor == torch.backends.cpu.get_cpu_capability()
    missing = probe.look({str(file): stamp, str(tmp_path / "b"): stamp})
    with pytest.raises(ClusterError, match=f"b: node {found.host} cannot read this file: No such file") as caught:
        cluster._refuse(missing)
    assert caught.value.file == str(tmp_path / "b")
    with pytest.raises(ClusterError, match="is a different file there"):
        cluster._refuse(probe.look({str(file): "1 2 3"}))
    with pytest.raises(ClusterError, match=rf"node a has moepack 0\.0\.9, but this machine has {moepack.__version__}"):
        cluster._refuse(found._replace(host="a", version="0.0.9"))
    monkeypatch.setitem(sys.modules, "moepack", None)
    with pytest.raises(ClusterError, match="cannot import moepack"):
        cluster._refuse(probe.look({}))


@pytest.mark.parametrize("name", ["finequant", "rate with a text"])
def test_a_model_of_the_hub_is_read_by_ranges(
    name: str, tmp_path: Path, copies: list[Copies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes need no common path: tasks read their own weights, with the token of their machine."""
    model = tiny_models.build("qwen3_moe", tmp_path / "model", max_shard_size="60KB")
    with serving({"someone/moe": model}, token="secret") as hub:
        use(hub, tmp_path, monkeypatch)
        monkeypatch.setenv("HF_TOKEN", "secret")
        moepack.compress("someone/moe", tmp_path / "shared", method=methods(tmp_path)[name], ray="anywhere")
        assert all(each.start is not None for each in hub.shards())
    moepack.compress(model, tmp_path / "alone", method=methods(tmp_path)[name])
    shared, alone = (support.contents(tmp_path / out) for out in ("shared", "alone"))
    assert {**shared, RECIPE: b""} == {**alone, RECIPE: b""}
    assert not list((tmp_path / "cache").rglob("*.safetensors")) and not list(tmp_path.glob("shared.*"))


def test_shards_in_the_cache_of_a_machine_are_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.build("qwen3_moe", tmp_path / "model")
    with serving({"someone/moe": model}) as hub:
        use(hub, tmp_path, monkeypatch)
        cached(tmp_path / "cache", "someone/moe", model)
        assert open_remote("someone/moe") is None
        found = open_remote("someone/moe", even_cached=True)
        assert found is not None
        checkpoint = pickle.loads(pickle.dumps(found[0]))
        count = len(hub.requests)
        original = Checkpoint.open(model)
        for tensor in original.names():
            assert torch.equal(checkpoint.tensor(tensor), original.tensor(tensor))
        assert len(hub.requests) == count
        shutil.rmtree(tmp_path / "cache")
        tensor = original.names()[-1]
        assert torch.equal(checkpoint.tensor(tensor), original.tensor(tensor)) and len(hub.requests) > count
