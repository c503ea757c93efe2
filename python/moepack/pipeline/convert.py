"""`convert`: converts a model in the QMoE authors' published format to a packed directory, without requantizing."""

import os
import time
from os import PathLike
from pathlib import Path

from moepack.backends.threads import set_threads
from moepack.checkpoint import describe
from moepack.checkpoint.published import PublishedCheckpoint
from moepack.format.atomic import refuse_existing
from moepack.memory import PeakMemory
from moepack.methods.qmoe.published import Published
from moepack.pipeline.assignment import Assignment
from moepack.pipeline.job import Job
from moepack.pipeline.report import CompressReport
from moepack.pipeline.soundness import check_source
from moepack.progress import Progress, Silent

__all__ = ["convert"]


def convert(
    published: str | PathLike[str],
    out: str | PathLike[str],
    *,
    original: str | PathLike[str] | None = None,
    code: str = "fsv8",
    threads: int | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> CompressReport:
    """Convert a model published in the QMoE authors' format. The experts' values are preserved exactly.

    Args:
        published: directory with `noexp.pt`, `exp00.pt`, ... and `config.json`.
        out: directory to create; it must not exist.
        original: directory of the original Switch model, for its configuration, its tokenizer and, if `noexp.pt` lacks
            them, its dense tensors. `None` uses the configuration in `published`.
        code: entropy code of the result: `fsv8`, or `dict16` as published.
        threads, resume, progress: as for `compress`.

    Returns:
        Sizes, times and memory. Source sizes refer to the model in bf16.

    Raises:
        CheckpointError: a file is missing or damaged, or the two directories hold different models.
        UnsupportedModelError: the directory has no model in that format, or the original is not a Switch model.
        InvalidTensorError: published experts are not ternary.
        OutputExistsError, ResumeError, DiskError, KeyboardInterrupt: as for `compress`.
    """
    started, peak, target = time.perf_counter(), PeakMemory(), Path(os.path.abspath(out))
    refuse_existing(target)
    if threads is not None:
        set_threads(threads)
    checkpoint = PublishedCheckpoint.open_pair(published, original)
    model, assignment = describe(checkpoint), Assignment(Published(code))
    check_source(checkpoint, model, assignment)
    job = Job(checkpoint, model, assignment.planned(checkpoint, model), progress or Silent(), peak)
    return job.run(target, resume, started)
