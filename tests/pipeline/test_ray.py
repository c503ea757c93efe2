"""Compression on a Ray cluster on this machine: identical bytes, dying and unsuitable nodes, tokens, Ctrl-C."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_distributed import methods

import moepack
import packed_support as support
from command_support import interruptible
from moepack.errors import ClusterError
from moepack.format.directory import read_manifest
from moepack.methods import FineQuant
from moepack.methods.qmoe.ternary import Ternary
from moepack.pipeline.distributed import access
from moepack.pipeline.distributed import cluster as connection
from moepack.progress import Silent
from places import TESTS
from ray_support import OnGpus, Slow, killing_look

pytest.importorskip("ray", reason="Ray is not installed: pip install 'moepack[ray]'")

PYTHON_PATH = f"{Path(moepack.__file__).parents[1]}{os.pathsep}{TESTS}"
SPEED = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
WAIT = 100.0
"""Seconds that a test waits for an event that takes a few seconds, for busy machines."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that becomes true within seconds, or later on a slow machine."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(process: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster whose first node, the driver's, runs no tasks."""
    from ray.cluster_utils import Cluster

    for name, value in {"PYTHONPATH": PYTHON_PATH, **SPEED}.items():
        monkeypatch.setenv(name, value)
    # A killed node is dropped after three seconds.
    settings = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": settings})
    yield found
    found.shutdown()


class Killing(Silent):
    """Progress that kills a node after a number of tensors."""

    def __init__(self, cluster: Any, node: Any, tensors: int) -> None:
        self.cluster, self.node, self.left = cluster, node, tensors

    def advance(self, count: int, memory: int) -> None:
        self.left -= bool(count)
        if count and not self.left:
            self.cluster.remove_node(self.node, allow_graceful=False)


def test_bytes_match_a_local_run_although_a_node_dies(mixtral: Path, tmp_path: Path, nodes: Any) -> None:
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


@pytest.mark.parametrize("name", ["auto with a text", pytest.param("qmoe at a rate", marks=pytest.mark.slow)])
def test_experts_that_share_bits_are_solved_on_nodes_that_die(
    name: str, mixtral: Path, tmp_path: Path, nodes: Any
) -> None:
    """A node dies after the first group of experts, which is a wave by itself; the next wave runs on the other one."""
    first, _ = (nodes.add_node(num_cpus=1) for _ in range(2))
    killing = Killing(nodes, first, 1)
    method = methods(tmp_path)[name]
    moepack.compress(mixtral, tmp_path / "shared", method=method, ray=nodes.address, threads=1, progress=killing)
    moepack.compress(mixtral, tmp_path / "alone", method=methods(tmp_path)[name], threads=1)
    assert support.contents(tmp_path / "shared") == support.contents(tmp_path / "alone")
    assert killing.left < 0


def test_tasks_run_where_the_gpus_are(mixtral: Path, tmp_path: Path, nodes: Any) -> None:
    """Ray counts GPUs that it is told of, so that a machine without one can be asked for two."""
    nodes.add_node(num_cpus=2)
    nodes.add_node(num_cpus=2, num_gpus=2)
    method = OnGpus(4, device="cuda")
    method.given = tmp_path / "given"
    method.given.mkdir()
    moepack.compress(mixtral, tmp_path / "shared", method=method, ray=nodes.address, threads=1)
    assert {each.name for each in method.given.iterdir()} in ({"0"}, {"1"}, {"0", "1"})
    moepack.compress(mixtral, tmp_path / "alone", method=FineQuant(4), threads=1)
    shared, alone = (read_manifest(tmp_path / out).tensors for out in ("shared", "alone"))
    assert shared == alone


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
    with pytest.raises(ClusterError, match=rf"has moepack 0\.0\.9, but this machine has {moepack.__version__}"):
        compress()
    nodes.remove_node(stranger)
    assert not (tmp_path / "out.partial").exists()
    monkeypatch.setattr(connection, "LOOK", 0.5)
    monkeypatch.setattr(connection, "PATIENCE", 1.0)
    with pytest.raises(ClusterError, match=r"no node is left that can run a task|lost a task"):
        compress(progress=Killing(nodes, only, 3))  # six tensors, two of them in progress
    assert (tmp_path / "out.partial" / "journal.jsonl").exists()
    moepack.compress(mixtral, out, method=Slow(4))
    moepack.verify(out)


@pytest.mark.parametrize("address", ["127.0.0.1:9", "127.0.0.1:nine", "127.0.0.1:99999", "nowhere"])
def test_no_cluster_at_an_address(mixtral: Path, tmp_path: Path, address: str) -> None:
    with pytest.raises(ClusterError, match=rf"{re.escape(address)}: cannot connect to a Ray cluster"):
        moepack.compress(mixtral, tmp_path / "out", method=Ternary(), ray=address)
    assert list(tmp_path.iterdir()) == []


def test_a_look_is_repeated_and_a_node_that_dies_is_left_out(
    tmp_path: Path, nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection.probe, "look", killing_look)
    monkeypatch.setattr(connection, "LOOK", 0.5)
    nodes.add_node(num_cpus=1, env_vars={"KILL_NODE": "1"})
    cluster = connection.Cluster(nodes.address, 1)
    try:
        with pytest.raises(ClusterError, match="no node is left that can run a task"):
            cluster.check({})
        nodes.add_node(num_cpus=1, env_vars={"KILL_NODE": "1"})
        nodes.add_node(num_cpus=1, env_vars={"KILL_PROCESS": str(tmp_path / "killed")})
        cluster.check({})
        assert (tmp_path / "killed").exists() and cluster.slots == 1
    finally:
        cluster.close()


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a one-node cluster started by `ray start` with a token."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (access.AUTH_MODE, access.TOKEN_VALUE, access.TOKEN_PATH):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("0123456789abcdef" * 4)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}"]
    command += ["--node-ip-address=127.0.0.1", "--num-cpus=1", "--include-dashboard=false"]
    environment = {**os.environ, **SPEED, "PYTHONPATH": PYTHON_PATH}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # paths of sockets are 107 bytes long at most
        command.append(f"--temp-dir={folder}")
        log = tmp_path / "log"
        with log.open("w") as out:
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            wait_until(lambda: process.poll() is not None or "Ray runtime started" in log.read_text())
            assert process.poll() is None, log.read_text()
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(WAIT)


def test_a_cluster_with_a_token(mixtral: Path, tmp_path: Path, guarded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal() -> str:
        with pytest.raises(ClusterError) as caught:
            access.reach(guarded)
        return str(caught.value)

    moepack.compress(mixtral, tmp_path / "shared", method=Ternary(), ray=guarded, threads=1)
    assert access.AUTH_MODE not in os.environ
    moepack.compress(mixtral, tmp_path / "alone", method=Ternary(), threads=1)
    assert support.contents(tmp_path / "shared") == support.contents(tmp_path / "alone")
    with monkeypatch.context() as change:
        change.setenv(access.TOKEN_PATH, str(tmp_path / "none"))
        assert f"this machine has none ({tmp_path / 'none'}: No such file" in refusal()
        change.setenv(access.TOKEN_VALUE, "wrong")
        assert "does not accept the token in RAY_AUTH_TOKEN:" in refusal()
    monkeypatch.setenv(access.AUTH_MODE, "disabled")
    assert "it requires a token, but RAY_AUTH_MODE is 'disabled' here" in refusal()
    monkeypatch.setenv(access.AUTH_MODE, "token")
    # Ray's environment is changed in the process of the attempt.
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import ray\nray.__version__ = '2.0.9'")
    assert re.search(r"Version mismatch: .*2\.0\.9", refusal())
    monkeypatch.setitem(access.TIMEOUTS, "RAY_gcs_server_request_timeout_seconds", "1")
    (tmp_path / "sitecustomize.py").write_text("import ray._private.services as s\ns.find_node_ids = list")
    assert f"this machine is not a node of it: run `ray start --address={guarded}` here" in refusal()


def test_a_server_that_is_not_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in access.TIMEOUTS:
        monkeypatch.setitem(access.TIMEOUTS, name, "1")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(ClusterError, match="does not answer like a Ray cluster"),
    ):
        access.reach(f"127.0.0.1:{server.getsockname()[1]}")


def test_an_interrupted_job_continues(mixtral: Path, tmp_path: Path) -> None:
    (pids := tmp_path / "pids").mkdir()
    script = f"""
import moepack, sys
from pathlib import Path
from ray_support import Stuck
method = Stuck(4, calibration=None)
method.pids = Path({str(pids)!r})
try:
    moepack.compress({str(mixtral)!r}, {str(tmp_path / "out")!r}, method=method, ray="local", threads=1)
except KeyboardInterrupt:
    sys.exit(130)
"""
    environment = {**os.environ, **SPEED, "PYTHONPATH": PYTHON_PATH, "HOME": str(tmp_path)}
    with interruptible():
        process = subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True)
    try:
        wait_until(lambda: process.poll() is not None or any(tmp_path.glob("out.partial/model-*.safetensors")))
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(WAIT) == 130
        begun = [int(each.name) for each in pids.iterdir()]
        assert begun
        wait_until(lambda: not any(map(runs, begun)))
    finally:
        if process.poll() is None:
            process.kill()
    report = moepack.compress(mixtral, tmp_path / "out", method=FineQuant(4))
    assert 0 < report.resumed_weights < report.expert_weights
    moepack.verify(tmp_path / "out")
