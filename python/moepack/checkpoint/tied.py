"""Detects heads that config.json ties to the embedding but the checkpoint stores with different values.

Transformers does not tie such heads. Using the packed embedding as the head would give wrong outputs.
"""

from moepack.checkpoint.architectures import ARCHITECTURES
from moepack.checkpoint.reader import Checkpoint

__all__ = ["untied"]

_TIED = "tie_word_embeddings"


def untied(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the tie removed if the stored head differs from the embedding.

    If both are stored, both are read.

    Raises:
        CheckpointError: a file changed after the checkpoint was opened.
    """
    architecture = ARCHITECTURES.get(checkpoint.config["model_type"])
    if architecture is None or not architecture.looks_up or not checkpoint.config.get(_TIED):
        return checkpoint
    head, embedding = architecture.head, architecture.embeddings
    if head not in checkpoint or embedding not in checkpoint:
        return checkpoint
    infos = checkpoint.info(head), checkpoint.info(embedding)
    alike = [(info.shape, info.dtype, info.strides) for info in infos]
    if alike[0] == alike[1] and checkpoint.files.equal(*infos):
        return checkpoint
    note = f"{head} differs from {embedding}: they are loaded untied despite config.json, as in transformers."
    checkpoint.config = {**checkpoint.config, _TIED: False}
    checkpoint.notes = (*checkpoint.notes, note)
    return checkpoint
