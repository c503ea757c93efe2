"""The connection to a Ray cluster: its nodes, looked at before any work, tasks on them, and what came of these.

Ray repeats tasks whose node died, and makes lost results again; a task has no effect but its result. The connection
that a program has open already is used, and left open.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from moepack import __version__
from moepack.errors import ClusterError, MoepackError, MoepackWarning
from moepack.pipeline.distributed import probe

__all__ = ["Cluster"]

LOCAL = "local"
RETRIES = 4
"""How often a task is repeated whose node or process died."""

KNOCK = 10.0
"""Seconds that a cluster has to answer its address."""

LOOK, PATIENCE = 5.0, 60.0
"""Seconds between looks at the nodes while a result is waited for; for how long none may be able to run a task."""


class Cluster:
    """A cluster that shares a job.

    Attributes:
        ray: the module.
        threads: cores that each task takes, and threads that it uses.
    """

    def __init__(self, address: str, threads: int) -> None:
        """Connect to the cluster at `address`, or start one on this machine if it is "local".

        Raises:
            ClusterError: Ray is not installed, there is no cluster, or no node has so many cores.
        """
        try:
            import ray
        except ImportError as error:
            raise ClusterError("a job is shared through Ray: pip install 'moepack[ray]'") from error
        self.ray, self.address, self.threads, self._running = ray, address, threads, set[Any]()
        self._own = not ray.is_initialized()
        if self._own:
            self._connect()
        if not self.slots:
            self.close()
            message = f"no node has the {threads} cores that a task takes; --threads says how many"
            raise ClusterError(message, file=address)

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options: dict[str, Any] = {"address": self.address, "log_to_driver": False, "logging_level": logging.ERROR}
        if self.address == LOCAL:
            options |= {"num_cpus": len(os.sched_getaffinity(0)), "include_dashboard": False}
        try:
            _knock(self.address)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.ray.init(**options)
        except (OSError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            raise ClusterError(f"cannot connect to a Ray cluster: {error}", file=self.address) from error

    @property
    def slots(self) -> int:
        """Tasks that can run at a time."""
        return sum(int(node["Resources"].get("CPU", 0)) // self.threads for node in self._nodes())

    def _nodes(self) -> list[Mapping[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]

    def check(self, stamps: Mapping[str, str]) -> None:
        """Refuse nodes that could not take part; warn of those whose processors are not like this one.

        Args:
            stamps: of the files that tasks read (`moepack.format.header.stamp_of`), by their paths.

        Raises:
            ClusterError: a node lacks moepack or has another version of it, or does not see a file; names it.
        """
        from ray import cloudpickle
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

        cloudpickle.register_pickle_by_value(probe)
        try:
            look = self.ray.remote(num_cpus=0, max_retries=0)(probe.look)
            nodes = [node["NodeID"] for node in self._nodes() if node["Resources"].get("CPU")]
            found = [look.options(scheduling_strategy=On(node, soft=False)).remote(stamps) for node in nodes]
            findings = [self.result(self._noted(each)) for each in found]
        finally:
            cloudpickle.unregister_pickle_by_value(probe)
        for each in findings:
            _refuse(each)
        own = torch.backends.cpu.get_cpu_capability()
        if others := sorted({each.host for each in findings if each.processor != own}):
            message = f"{', '.join(others)}: other processors than here, so rounding, and the bytes with it, may differ"
            warnings.warn(message, MoepackWarning, stacklevel=2)

    def share(self, value: Any) -> Any:
        """Put a value where tasks find it."""
        return self.ray.put(value)

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """Begin a task; gives what `result` takes."""
        task = self.ray.remote(num_cpus=self.threads, max_retries=RETRIES)(work)
        return self._noted(task.remote(self.threads, *arguments))

    def result(self, task: Any) -> Any:
        """Wait for the result of a task.

        Raises:
            ClusterError: its node died too often, or no node is left that could run it.
            MoepackError: what the task raised.
        """
        able = time.monotonic()
        with self._errors():
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
    def _errors(self) -> Iterator[None]:
        from ray import exceptions

        try:
            yield
        except exceptions.RayTaskError as error:
            if isinstance(error.cause, MoepackError):
                raise error.cause from error
            raise
        except exceptions.RayError as error:
            raise ClusterError(f"lost a task: {error}", file=self.address) from error

    def close(self) -> None:
        """Cancel what runs, and disconnect; a cluster of this process's own ends."""
        for task in self._running:
            with suppress(Exception):
                self.ray.cancel(task, force=True)
        self._running.clear()
        if self._own:
            self.ray.shutdown()


def _knock(address: str) -> None:
    """See that somebody listens at an address HOST:PORT: Ray would try again for minutes.

    Raises:
        OSError: nobody does.
        ValueError: the port is no number.
    """
    host, colon, port = address.rpartition(":")
    if colon and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK):
            pass


def _refuse(found: probe.Findings) -> None:
    if found.version is None:
        raise ClusterError(f"node {found.host} has no moepack that loads; here it is {__version__}")
    if found.version != __version__:
        raise ClusterError(f"node {found.host} has moepack {found.version}, here it is {__version__}")
    if found.unseen:
        path, reason = found.unseen
        raise ClusterError(f"node {found.host} does not see it: {reason}", file=path)
