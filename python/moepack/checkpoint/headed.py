"""Corrects the class in config.json for models that are declared headless but have their head.

`save_pretrained` of a base model writes the class without head, and so do some programs that write config.json
themselves. Transformers' `AutoModelForCausalLM` ignores the class. If the head is stored or tied to the embedding,
moepack reads the model with its head.
"""

from typing import TypeGuard

from moepack.checkpoint.architectures import ARCHITECTURES
from moepack.checkpoint.classes import model_class
from moepack.checkpoint.reader import Checkpoint

__all__ = ["headed", "is_headless"]

_CLASSES = "architectures"

_HEAD = "lm_head.weight"
"""Name of the head for architectures without a description."""


def headed(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the class that has the head, if the head is there. No tensor is read."""
    import transformers

    config, kind = checkpoint.config, checkpoint.config["model_type"]
    classes, known = config.get(_CLASSES), transformers.CONFIG_MAPPING
    if kind not in known or "text_config" in config or not is_headless(classes):
        return checkpoint
    mapping = getattr(model_class({**config, _CLASSES: None}), "_model_mapping", {})
    head = ARCHITECTURES[kind].head if kind in ARCHITECTURES else _HEAD
    stored = any(f".{name}".endswith(f".{head}") for name in checkpoint.names())
    if known[kind] not in mapping or not (stored or config.get("tie_word_embeddings")):
        return checkpoint
    name = mapping[known[kind]].__name__
    note = (
        f"config.json names {classes[0]}, a model without a head; the checkpoint has a head, so it is read as {name}."
    )
    checkpoint.config = {**config, _CLASSES: [name]}
    checkpoint.notes = (*checkpoint.notes, note)
    return checkpoint


def is_headless(names: object) -> TypeGuard[list[str]]:
    """Return whether the first class in config.json is a model without head, by transformers' naming convention."""
    return isinstance(names, list) and bool(names) and isinstance(names[0], str) and names[0].endswith("Model")
