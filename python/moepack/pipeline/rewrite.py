"""A method's change of a checkpoint, remembered beside the packed directory for resumed runs.

What the change was made from (a rotation) may have taken gradient steps whose rounding depends on the threads. So it is
kept in `OUT.state` until the job is done: the bytes of a resumed job do not depend on where it was interrupted. The
file names the model, method and settings that it was made from; another job ignores it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.rewritten import RewrittenCheckpoint
from moepack.errors import ResumeError
from moepack.format.atomic import write_file
from moepack.methods import Method

__all__ = ["STATE", "rewritten"]

STATE = ".state"
"""Suffix of the file."""

_OWNER = "owner"


def rewritten(
    checkpoint: Checkpoint, model: MoeModel, method: Method, file: Path, resume: bool
) -> tuple[Checkpoint, Callable[[], None]]:
    """The checkpoint that the method wants packed: the given one or a changed one.

    Nothing is written yet: the file may belong to another job, which may be running.

    Returns:
        The checkpoint, and what keeps the change in `file`, for the moment when the output is this job's.

    Raises:
        ResumeError: what an earlier run left there cannot be read.
    """
    owner = _owner(checkpoint, method)
    kept = _kept(file, owner) if resume and file.exists() else None
    rewriting = method.rewrite(checkpoint, model, kept)
    if rewriting is None:
        return checkpoint, lambda: None

    def keep() -> None:
        if rewriting.state is not kept:
            tensors = {name: tensor.contiguous() for name, tensor in rewriting.state.items()}
            write_file(file, safetensors.torch.save(tensors, {_OWNER: owner}))

    return RewrittenCheckpoint(checkpoint, rewriting), keep


def _owner(checkpoint: Checkpoint, method: Method) -> str:
    """What a change is made from: model, method and settings."""
    content = [checkpoint.fingerprint(), method.name, dict(method.settings)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _kept(file: Path, owner: str) -> dict[str, Tensor] | None:
    """What an earlier run of the same job kept; None for another job's."""
    try:
        with safetensors.safe_open(file, "pt") as found:
            if (found.metadata() or {}).get(_OWNER) != owner:
                return None
            return {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ResumeError(f"cannot be read ({error}); --no-resume starts over", file=file) from error
