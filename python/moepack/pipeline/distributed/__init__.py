"""Shares a job among the machines of a Ray cluster that all see the checkpoint under the same path.

The driver, the process that runs the job, submits tasks and takes their results in the order of a local run. Only the
driver writes shards, journal and manifest, so the directory is byte-identical to that of a local run, and an
interrupted job resumes as usual. A task reads its own weights. The object store carries packed tensors; for methods
that run the model, it also carries the experts' inputs once per layer, and codes and outputs for each group of experts.

`access` tests in a separate script (`attempt`) whether a cluster accepts this machine. `probe` inspects the machines,
`cluster` holds the connection, `tasks` run on the nodes, and `executor` distributes them.
"""

from moepack.pipeline.distributed.executor import RayExecutor, refuse

__all__ = ["RayExecutor", "refuse"]
