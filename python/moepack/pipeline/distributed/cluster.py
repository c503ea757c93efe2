"""The connection to a Ray cluster: checks its nodes before any work, submits tasks and collects their results.

Ray repeats tasks whose node died, and recomputes lost results; a task has no side effects. An existing connection of
the program is reused and left open. A connection opened here restores the environment on close.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import torch

from moepack import __version__
from moepack.errors import ClusterError, MoepackError, MoepackWarning
from moepack.pipeline.distributed import probe
from moepack.pipeline.distributed.access import AUTH_MODE, reach
from moepack.system import processors

__all__ = ["Cluster"]

LOCAL = "local"
RETRIES = 4
"""How often a task is repeated if its node or process dies."""

LOOK, PATIENCE = 5.0, 60.0
"""Seconds between node checks while waiting for a result; seconds after which to give up if no node can run tasks."""

ANSWER = 300.0
"""Seconds in which a node's processes must start and import moepack, possibly from a slow network drive."""


class Cluster:
    """A cluster that shares a job.

    Attributes:
        ray: the `ray` module.
        threads: cores and threads of each task.
        gpus: GPUs of each task, 0 or 1.
    """

    def __init__(self, address: str, threads: int, gpus: int = 0) -> None:
        """Connect to the cluster at `address`, or start one on this machine if it is "local".

        Raises:
            ClusterError: Ray is not installed, there is no cluster, or no node has `threads` cores and `gpus` GPUs.
        """
        try:
            import ray
        except ImportError as error:
            raise ClusterError("sharing a job requires Ray: pip install 'moepack[ray]'") from error
        self.ray, self.address, self.threads, self.gpus = ray, address, threads, gpus
        self._running = set[Any]()
        self._own = not ray.is_initialized()
        if self._own:
            self._connect()
        if not self.slots:
            self.close()
            also = " and the GPU" if gpus else ""
            message = f"no node has the {threads} cores{also} that a task takes; --threads sets the number of cores"
            raise ClusterError(message, file=address)

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        self._auth_mode = os.environ.get(AUTH_MODE)
        options: dict[str, Any] = {"address": self.address, "log_to_driver": False, "logging_level": logging.ERROR}
        if self.address == LOCAL:
            options |= {"num_cpus": processors.usable(), "include_dashboard": False}
        elif needed := reach(self.address):
            os.environ.update(needed)
            _reread_settings()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.ray.init(**options)
        except Exception as error:
            self._restore_auth_mode()
            raise ClusterError(f"cannot connect to a Ray cluster: {error}", file=self.address) from error

    def _restore_auth_mode(self) -> None:
        """Undo changes of the environment made for the connection by this class, or by Ray for its own clusters."""
        if self._auth_mode is None and AUTH_MODE in os.environ:
            del os.environ[AUTH_MODE]
            _reread_settings()

    @property
    def slots(self) -> int:
        """Number of tasks that can run at the same time."""
        return sum(self._slots(node["Resources"]) for node in self._nodes())

    def _slots(self, resources: Mapping[str, float]) -> int:
        """Return the number of tasks that can run on a node at the same time."""
        by_cores = int(resources.get("CPU", 0)) // self.threads
        return min(by_cores, int(resources.get("GPU", 0)) // self.gpus) if self.gpus else by_cores

    def _nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def check(self, stamps: Mapping[str, str]) -> None:
        """Reject nodes that cannot take part; warn about nodes with different processors.

        Args:
            stamps: stamps (`moepack.format.header.stamp_of`) of the files that tasks read, by path.

        Raises:
            ClusterError: a node lacks moepack, has another version, or does not see a file; names the node.
        """
        from ray import cloudpickle
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        cloudpickle.register_pickle_by_value(probe)
        try:
            look = self.ray.remote(num_cpus=0, max_retries=RETRIES)(probe.look)
            nodes = [node for node in self._nodes() if node["Resources"].get("CPU")]
            found = [
                self._noted(look.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote(stamps))
                for node in nodes
            ]
            until = time.monotonic() + ANSWER
            looked = [self._looked(node, task, until) for node, task in zip(nodes, found, strict=True)]
        finally:
            cloudpickle.unregister_pickle_by_value(probe)
        findings = [each for each in looked if each is not None]
        if not findings:
            raise ClusterError("no node is left that can run a task", file=self.address)
        for each in findings:
            _refuse(each)
        own = torch.backends.cpu.get_cpu_capability()
        if others := sorted({each.host for each in findings if each.processor != own}):
            message = (
                f"{', '.join(others)}: processors differ from this machine's, so rounding and output bytes may differ"
            )
            warnings.warn(message, MoepackWarning, stacklevel=2)

    def _looked(self, node: Mapping[str, Any], task: Any, until: float) -> probe.Findings | None:
        """Return the findings of a node; None if the node died meanwhile, because its tasks then run on others."""
        host, name = node["NodeManagerHostname"], node["NodeID"]
        try:
            while not self.ray.wait([task], timeout=LOOK)[0]:
                if name not in self._alive():
                    return None
                if time.monotonic() > until:
                    message = f"node {host} did not answer within {ANSWER:.0f} seconds: no process starts there"
                    raise ClusterError(message, file=self.address)
            findings: probe.Findings = self.ray.get(task)
            return findings
        except self.ray.exceptions.RayError as error:
            if name not in self._alive():
                return None
            raise ClusterError(f"node {host} cannot run a task: {error}", file=self.address) from error
        finally:
            self._running.discard(task)

    def _alive(self) -> set[str]:
        return {node["NodeID"] for node in self._nodes()}

    def share(self, value: Any) -> Any:
        """Put a value into the object store.

        Raises:
            ClusterError: the object store has no room for it.
        """
        with self._errors("cannot share a value"):
            return self.ray.put(value)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Submit a task; returns a handle for `result`."""
        task = self.ray.remote(num_cpus=self.threads, num_gpus=self.gpus, max_retries=RETRIES)(work)
        return self._noted(task.remote(self.threads, *arguments))

    def result(self, task: Any) -> Any:
        """Wait for the result of a task.

        Raises:
            ClusterError: the task's node died too often, or no node is left that can run it.
            MoepackError: the task raised it.
        """
        able = time.monotonic()
        with self._errors("lost a task"):
            while not self.ray.wait([task], timeout=LOOK)[0]:
                able = time.monotonic() if self.slots else able
                if time.monotonic() - able > PATIENCE:
                    raise ClusterError("no node is left that can run a task", file=self.address)
            self._running.discard(task)
            return self.ray.get(task)

    def _noted(self, task: Any) -> Any:
        self._running.add(task)
        return task

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        from ray import exceptions

        try:
            yield
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, MoepackError):
                raise error.cause from error
            raise
        except exceptions.RayError as error:
            raise ClusterError(f"{what}: {error}", file=self.address) from error

    def close(self) -> None:
        """Cancel running tasks and disconnect; a cluster that this process started ends."""
        for task in self._running:
            with suppress(Exception):
                self.ray.cancel(task, force=True)
        self._running.clear()
        if self._own:
            self.ray.shutdown()
            self._restore_auth_mode()


def _reread_settings() -> None:
    """Make Ray reread its environment, which it otherwise reads only on import."""
    with suppress(ImportError, AttributeError):  # private interface; may be missing in versions without tokens
        import_module("ray._raylet").Config.initialize("")


def _refuse(found: probe.Findings) -> None:
    if found.version is None:
        raise ClusterError(f"node {found.host} cannot import moepack; this machine has {__version__}")
    if found.version != __version__:
        raise ClusterError(f"node {found.host} has moepack {found.version}, but this machine has {__version__}")
    if found.unseen:
        path, reason = found.unseen
        raise ClusterError(f"node {found.host} cannot read this file: {reason}", file=path)
