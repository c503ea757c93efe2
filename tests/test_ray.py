"""Compression on a Ray cluster of this machine's processes: the same bytes, nodes that die or do not fit, Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moepack
import packed_support as support
from moepack.errors import ClusterError
from moepack.pipeline.distributed import cluster as connection
from moepack.progress import Silent
from ray_support import Slow
from test_distributed import methods

pytest.importorskip("ray", reason="Ray is not installed: pip install 'moepack[ray]'")

HERE = Path(__file__).parent


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose first node, the driver's, runs no tasks."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", f"{Path(moepack.__file__).parents[1]}{os.pathsep}{HERE}")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # A node that is killed is given up after three seconds.
    settings = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": settings})
    yield found
    found.shutdown()


class Killing(Silent):
    """Progress that kills a node once so many tensors are done."""

    def __init__(self, cluster: Any, node: Any, tensors: int) -> None:
        self.cluster, self.node, self.left = cluster, node, tensors

    def advance(self, count: int, memory: int) -> None:
        self.left -= bool(count)
        if count and not self.left:
            self.cluster.remove_node(self.node, allow_graceful=False)


def test_bytes_are_those_of_a_local_run_though_a_node_dies(mixtral: Path, tmp_path: Path, nodes: Any) -> None:
    first, _ = (nodes.add_node(num_cpus=1) for _ in range(2))
    killing = Killing(nodes, first, 1)
    moepack.compress(mixtral, tmp_path / "shared", method=Slow(4), ray=nodes.address, threads=1, progress=killing)
    moepack.compress(mixtral, tmp_path / "alone", method="finequant", bits=4, threads=1)
    assert support.contents(tmp_path / "shared") == support.contents(tmp_path / "alone")
    assert killing.left < 0
    for name in ("milo", "qmoe"):
        for place, address in (("alone", None), ("shared", nodes.address)):
            method = methods(tmp_path)[name]
            moepack.compress(mixtral, tmp_path / name / place, method=method, ray=address, threads=1)
        assert support.contents(tmp_path / name / "shared") == support.contents(tmp_path / name / "alone")


def test_nodes_that_do_not_fit_are_refused(
    mixtral: Path, tmp_path: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compress(threads: int = 1, progress: Any = None) -> None:
        method = Slow(4)
        moepack.compress(mixtral, out, method=method, ray=nodes.address, threads=threads, progress=progress)

    out = tmp_path / "out"
    with pytest.raises(ClusterError, match="no node has the 1 cores that a task takes"):
        compress()
    only = nodes.add_node(num_cpus=1)
    with pytest.raises(ClusterError, match="no node has the 7 cores"):
        compress(threads=7)
    other = tmp_path / "moepack"
    other.mkdir()
    (other / "__init__.py").write_text("__version__ = '0.0.9'")
    stranger = nodes.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    with pytest.raises(ClusterError, match=rf"has moepack 0\.0\.9, here it is {moepack.__version__}"):
        compress()
    nodes.remove_node(stranger)
    assert not (tmp_path / "out.partial").exists()
    monkeypatch.setattr(connection, "LOOK", 0.5)
    monkeypatch.setattr(connection, "PATIENCE", 1.0)
    with pytest.raises(ClusterError, match=r"no node is left that can run a task|lost a task"):
        compress(progress=Killing(nodes, only, 4))
    assert (tmp_path / "out.partial" / "journal.jsonl").exists()
    moepack.compress(mixtral, out, method=Slow(4))
    moepack.verify(out)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:nine"])
def test_no_cluster_at_an_address(mixtral: Path, tmp_path: Path, address: str) -> None:
    with pytest.raises(ClusterError, match=rf"{re.escape(address)}: cannot connect to a Ray cluster"):
        moepack.compress(mixtral, tmp_path / "out", method="ternary", ray=address)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_job_goes_on(mixtral: Path, tmp_path: Path) -> None:
    script = f"""
import moepack, sys
from pathlib import Path
from ray_support import Slow
method = Slow(4)
method.marks = Path({str(tmp_path)!r})
try:
    moepack.compress({str(mixtral)!r}, {str(tmp_path / "out")!r}, method=method, ray="local", threads=1)
except KeyboardInterrupt:
    sys.exit(130)
"""
    path = f"{Path(moepack.__file__).parents[1]}{os.pathsep}{HERE}"
    environment = {**os.environ, "PYTHONPATH": path, "RAY_worker_niceness": "0"}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True) as process:
        journal, deadline = tmp_path / "out.partial" / "journal.jsonl", time.monotonic() + 100
        while not journal.exists() or journal.read_text().count('"shard"') < 1:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(30) == 130
    begun = len([*tmp_path.glob("model.layers.*")])
    time.sleep(3 * 0.3)
    assert len([*tmp_path.glob("model.layers.*")]) == begun, "tasks go on"
    report = moepack.compress(mixtral, tmp_path / "out", method=Slow(4))
    assert 0 < report.resumed_weights < report.expert_weights
    moepack.verify(tmp_path / "out")
