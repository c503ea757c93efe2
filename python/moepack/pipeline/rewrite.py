"""A method's change of a checkpoint, remembered beside the packed directory for resumed runs.

What the change was made from (a rotation) may have taken gradient steps whose rounding depends on the threads. So it is
kept in `OUT.state` until the job is done: the bytes of a resumed job do not depend on where it was interrupted.
"""

from __future__ import annotations

from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.rewritten import RewrittenCheckpoint
from moepack.errors import ResumeError
from moepack.format.atomic import disk_errors, write_file
from moepack.methods import Method

__all__ = ["STATE", "rewritten"]

STATE = ".state"
"""Suffix of the file."""


def rewritten(checkpoint: Checkpoint, model: MoeModel, method: Method, file: Path, resume: bool) -> Checkpoint:
    """The checkpoint that the method wants packed: the given one, or a changed one whose state is kept in `file`.

    Raises:
        ResumeError: what an earlier run left there cannot be used.
        DiskError: the disk refuses.
    """
    kept = _kept(file) if resume and file.exists() else None
    rewriting = method.rewrite(checkpoint, model, kept)
    if rewriting is None:
        return checkpoint
    if rewriting.state is not kept:
        with disk_errors(file.parent, "create"):
            file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, safetensors.torch.save({name: t.contiguous() for name, t in rewriting.state.items()}))
    return RewrittenCheckpoint(checkpoint, rewriting)


def _kept(file: Path) -> dict[str, Tensor]:
    try:
        found: dict[str, Tensor] = safetensors.torch.load_file(file)
    except (OSError, safetensors.SafetensorError) as error:
        raise ResumeError(f"cannot be read ({error}); --no-resume starts over", file=file) from error
    return found
