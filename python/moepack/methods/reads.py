"""What a decoding step reads of a model's weights."""

from collections.abc import Collection

from moepack.allocation.importance import visits
from moepack.checkpoint import Checkpoint, MoeModel
from moepack.checkpoint.architectures import described
from moepack.checkpoint.dense import EMBEDDING

__all__ = ["kept_reads", "reads_by_tensor"]


def reads_by_tensor(checkpoint: Checkpoint, model: MoeModel) -> dict[str, float]:
    """Return the share of each tensor's weights that a token reads, by packed name.

    This is k / E for experts, 1 for a linear layer, and 0 for an embedding that is not also the head: its rows are
    looked up.
    """
    chosen = described(model.architecture).top_k(checkpoint.config)
    found = {part.packed_name: visits(chosen, layer.experts) for layer in model.layers for part in layer.projections}
    linears = (linear for dense in model.dense for linear in dense.linears)
    return found | {linear.source: float(linear.role != EMBEDDING or is_tied(checkpoint)) for linear in linears}


def kept_reads(checkpoint: Checkpoint, model: MoeModel, packed: Collection[str]) -> int:
    """Return the bytes that a token reads of tensors that are not packed.

    Args:
        checkpoint: the source.
        model: its description.
        packed: names of the packed tensors, experts and linear layers.
    """
    shares = reads_by_tensor(checkpoint, model)
    kept = set(model.dense_names) - set(packed) - set(model.unread)
    return sum(checkpoint.info(name).nbytes for name in kept if shares.get(name, 1.0))


def is_tied(checkpoint: Checkpoint) -> bool:
    """Return whether the head's weights are those of the embedding."""
    return bool(checkpoint.config.get("tie_word_embeddings"))
