"""Calibration text that the model generates itself, for models whose training text is unlike any other text at hand.

Each window starts with a random token, and all further tokens are drawn from the model's predictions at temperature 1.
Sums in torch depend on the number of threads, so generated windows are kept in the user's cache directory: a resumed
job and another size use the same ones.
"""

from __future__ import annotations

import hashlib
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moepack.checkpoint import Checkpoint
from moepack.errors import CalibrationError
from moepack.integrations.loading import open_model
from moepack.memory import total_bytes
from moepack.system import files
from moepack.system.folders import cache_folder
from moepack.units import size as in_words

__all__ = ["own_windows"]

FORM = "1"
"""Version of the generation; change it when its results change."""

BATCH = 32
"""Windows generated together."""

MOST = 4
"""Maximum number of files in the cache; the oldest are deleted."""


def own_windows(checkpoint: Checkpoint, tokenizer: Any, samples: int, length: int, vocabulary: int) -> Tensor:
    """Return windows [samples, length] int64 that the model of a checkpoint generated.

    Args:
        checkpoint: the checkpoint; the whole model must fit in memory in bfloat16.
        tokenizer: its tokenizer, whose special tokens are not drawn.
        samples: number of windows.
        length: tokens per window.
        vocabulary: number of rows of the model's embedding.

    Raises:
        CalibrationError: the model is an encoder-decoder, or too large for the memory.
    """
    if checkpoint.config.get("is_encoder_decoder"):
        raise CalibrationError("an encoder-decoder cannot generate its own calibration text", file=checkpoint.path)
    file = _cache_file(checkpoint, samples, length)
    with suppress(OSError, SafetensorError, KeyError):
        kept: Tensor = load_file(file)["windows"]
        return kept
    _check_memory(checkpoint)
    windows = _generate(checkpoint.path, tokenizer, samples, length, vocabulary)
    with suppress(OSError, SafetensorError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        save_file({"windows": windows}, part)
        files.replace(part, file)
        for old in sorted(file.parent.glob("*.safetensors"), key=lambda each: each.stat().st_mtime)[:-MOST]:
            files.remove(old, missing_ok=True)
    return windows


def _cache_file(checkpoint: Checkpoint, samples: int, length: int) -> Path:
    known = (FORM, checkpoint.fingerprint(), samples, length)
    digest = hashlib.sha256(" ".join(map(str, known)).encode()).hexdigest()
    return cache_folder() / "own" / f"{digest[:32]}.safetensors"


def _check_memory(checkpoint: Checkpoint) -> None:
    weights = sum(math.prod(checkpoint.info(name).shape) for name in checkpoint.names())
    there = total_bytes()
    if there is not None and 2 * weights > there:
        message = f"generating a calibration text needs the whole model in memory ({in_words(2 * weights)})"
        raise CalibrationError(f"{message}, but only {in_words(there)} are installed", file=checkpoint.path)


@torch.inference_mode()
def _generate(path: Path, tokenizer: Any, samples: int, length: int, vocabulary: int) -> Tensor:
    """Generate windows; the random state of the caller does not change."""
    model = open_model(path, dtype="bfloat16")
    special = sorted({*tokenizer.all_special_ids} & {*range(vocabulary)})
    allowed = torch.tensor(sorted({*range(min(vocabulary, len(tokenizer)))} - {*special}))
    found = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first = allowed[torch.randint(len(allowed), (samples, 1))]
        for part in torch.split(first, BATCH):
            written = model.generate(
                part, attention_mask=torch.ones_like(part), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_length=length, min_length=length, suppress_tokens=special or None, pad_token_id=0,
            )  # fmt: skip
            found.append(written.cpu())
    return torch.cat(found).to(torch.int64).contiguous()
