"""Heads that config.json ties to the embedding and the checkpoint stores with other values.

Transformers does not tie them then, for what was stored is what was trained. A packed embedding that served as head,
too, would answer with the wrong matrix.
"""

import numpy as np

from moepack.checkpoint.architectures import ARCHITECTURES
from moepack.checkpoint.reader import Checkpoint

__all__ = ["untied"]

_TIED = "tie_word_embeddings"


def untied(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, whose configuration ties no head that is stored with other values than the embedding.

    Both are read where both are stored.

    Raises:
        CheckpointError: a file changed since the checkpoint was opened.
    """
    architecture = ARCHITECTURES.get(checkpoint.config["model_type"])
    if architecture is None or not architecture.looks_up or not checkpoint.config.get(_TIED):
        return checkpoint
    head, embedding = architecture.head, architecture.embeddings
    if head not in checkpoint or embedding not in checkpoint:
        return checkpoint
    infos = checkpoint.info(head), checkpoint.info(embedding)
    alike = infos[0].shape == infos[1].shape and infos[0].dtype == infos[1].dtype
    if alike and np.array_equal(checkpoint.raw(head), checkpoint.raw(embedding)):
        return checkpoint
    note = f"{head} differs from {embedding}: they are not tied, whatever config.json says, as transformers loads them."
    checkpoint.config = {**checkpoint.config, _TIED: False}
    checkpoint.notes = (*checkpoint.notes, note)
    return checkpoint
