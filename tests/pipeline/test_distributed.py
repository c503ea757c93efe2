"""Shared jobs on a simulated cluster of copies in this process: identical bytes for any task order, rejections, faults.

`test_ray.py` uses Ray's own processes, if Ray is installed.
"""

import os
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
import packed_support as support
from fault_support import every_method
from faults.test_disk_errors import failing
from moepack.errors import ClusterError, DiskError
from moepack.methods import FineQuant, Method, create
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline.distributed import cluster, executor, probe
from moepack.pipeline.distributed import remote as tasks


class Copies:
    """A cluster whose tasks see only copies from the time of submission, and run in reverse order."""

    def __init__(self, address: str, threads: int) -> None:
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
    return made


def methods(place: Path) -> dict[str, Method]:
    found = every_method(place)
    seen = {"calibration": str(place / "text.txt"), "samples": 4, "sequence_length": 32, "group": 2}
    found["auto"] = create("auto", calibration="none")
    found["qmoe"] = create("qmoe", **seen, dense_bits=4)
    found["codequant"] = create("codequant", **seen, rotation="random", activation_bits=8)
    return found


@pytest.mark.parametrize("name", ["auto", "codequant", "finequant", "finequant with a text", "floe", "qmoe"])
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


@pytest.mark.parametrize("name", ["auto", "qmoe"])
def test_a_full_disk_keeps_finished_work(name: str, mixtral: Path, tmp_path: Path, copies: list[Copies]) -> None:
    """The driver writes: rejections equal those of a local run, and each kind of run can continue the other."""
    out = tmp_path / "out"
    with failing("rename", 3), pytest.raises(DiskError):
        moepack.compress(mixtral, out, method=methods(tmp_path)[name], ray="anywhere")
    assert (tmp_path / "out.partial" / "journal.jsonl").exists()
    report = moepack.compress(mixtral, out, method=methods(tmp_path)[name], ray="anywhere")
    assert report.resumed_weights > 0
    moepack.compress(mixtral, tmp_path / "alone", method=methods(tmp_path)[name])
    assert support.contents(out) == support.contents(tmp_path / "alone")


def test_work_that_cannot_be_shared_is_refused(mixtral: Path, tmp_path: Path) -> None:
    methods(tmp_path)
    text = {"calibration": str(tmp_path / "text.txt"), "samples": 4, "sequence_length": 32}
    for name, more in (("auto", {}), ("rate", {"bits_per_weight": 2.0}), ("qmoe", {"bits_per_weight": 1.0})):
        with pytest.raises(ValueError, match=f"{name} quantizes the experts of a layer one after another"):
            moepack.compress(mixtral, tmp_path / "out", method=name, ray="anywhere", **text, **more)
    with pytest.raises(ValueError, match="--device must be cpu"):
        moepack.compress(mixtral, tmp_path / "out", method="milo", device="cuda", ray="anywhere")
    assert not (tmp_path / "out.partial").exists()


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
