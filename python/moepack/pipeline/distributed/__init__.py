"""A job shared by the machines of a Ray cluster, which all see the checkpoint under one path.

The driver, the process that was asked for the job, hands out tasks and takes their results in the order of a local run;
it alone writes shards, journal and manifest, so a directory is the same bytes, and an interrupted job resumes as ever.
A task reads its weights itself. Through the object store pass packed tensors; for methods that run the model, once a
layer, what its experts read, and for each group of experts codes and outputs.

`access` finds out whether a cluster accepts this machine, by a script (`attempt`); `probe` looks at the machines,
`cluster` holds the connection, `tasks` are what runs there, `executor` hands out.
"""

from moepack.pipeline.distributed.executor import RayExecutor, refuse

__all__ = ["RayExecutor", "refuse"]
