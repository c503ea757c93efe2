"""Shares a job among the machines of a Ray cluster.

All see the checkpoint under the same path, or read it from the Hub by ranges.

The driver, the process that runs the job, submits tasks and takes their results in the order of a local run. Only the
driver writes shards, journal and manifest, so the directory is byte-identical to that of a local run, and an
interrupted job resumes as usual. A task reads its own weights. The object store carries packed tensors. For methods
that run the model, it also carries the rows of the calibration set that a group of experts reads, and its codes and
outputs: the calibration set is divided among the nodes by the experts that its tokens choose.

`access` tests in a separate script (`attempt`) whether a cluster accepts this machine. `probe` inspects the machines,
`cluster` holds the connection, `tasks` run on the nodes, and `executor` distributes them.
"""

from moepack.pipeline.distributed.executor import RayExecutor, refuse

__all__ = ["RayExecutor", "refuse"]
