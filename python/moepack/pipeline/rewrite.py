"""Saves a method's change of a checkpoint next to the packed directory, for resumed runs.

A change such as a rotation may come from gradient steps whose rounding depends on the threads. It is kept in
`OUT.state` until the job is done, so the output of a resumed job does not depend on where it was interrupted. The file
records the model, method and settings of the change; another job ignores it.
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
from moepack.methods import Method, Rewrites

__all__ = ["STATE", "rewritten"]

STATE = ".state"
"""Suffix of the state file."""

_OWNER = "owner"


def rewritten(
    checkpoint: Checkpoint, model: MoeModel, method: Method, file: Path, resume: bool
) -> tuple[Checkpoint, Callable[[], None]]:
    """Return the checkpoint to pack: the original, or the one that the method changed.

    Nothing is written yet, because the file may belong to another job that may be running.

    Returns:
        The checkpoint, and a function that saves the change in `file`; call it once this job owns the output.

    Raises:
        ResumeError: the file of an earlier run cannot be read.
    """
    owner = _owner(checkpoint, method)
    kept = _kept(file, owner) if resume and file.exists() else None
    rewriting = method.rewrite(checkpoint, model, kept) if isinstance(method, Rewrites) else None
    if rewriting is None:
        return checkpoint, lambda: None

    def keep() -> None:
        if rewriting.state is not kept:
            tensors = {name: tensor.contiguous() for name, tensor in rewriting.state.items()}
            write_file(file, safetensors.torch.save(tensors, {_OWNER: owner}))

    return RewrittenCheckpoint(checkpoint, rewriting), keep


def _owner(checkpoint: Checkpoint, method: Method) -> str:
    """Return a digest of model, method and settings, which determine a change."""
    content = [checkpoint.fingerprint(), method.name, dict(method.settings)]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _kept(file: Path, owner: str) -> dict[str, Tensor] | None:
    """Load the tensors that an earlier run of the same job saved; None if the file belongs to another job."""
    try:
        with safetensors.safe_open(file, "pt") as found:
            if (found.metadata() or {}).get(_OWNER) != owner:
                return None
            return {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise ResumeError(f"cannot be read ({error}); start over with --no-resume", file=file) from error
