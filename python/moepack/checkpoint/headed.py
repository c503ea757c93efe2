"""Models that config.json calls headless although their head is there.

`save_pretrained` of the model below the head writes that model's class, and so do some programs that write config.json
themselves. Transformers' `AutoModelForCausalLM` does not look at the class. Where the head is stored, or is the
embedding, the model predicts tokens and is read so.
"""

from typing import TypeGuard

from moepack.checkpoint.architectures import ARCHITECTURES
from moepack.checkpoint.classes import model_class
from moepack.checkpoint.reader import Checkpoint

__all__ = ["headed", "is_headless"]

_CLASSES = "architectures"


def headed(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, whose configuration names the class with the head that it has; no tensor is read."""
    import transformers

    config = checkpoint.config
    architecture, kind = ARCHITECTURES.get(config["model_type"]), config["model_type"]
    if architecture is None or kind not in transformers.CONFIG_MAPPING or not is_headless(config.get(_CLASSES)):
        return checkpoint
    stored = any(f".{name}".endswith(f".{architecture.head}") for name in checkpoint.names())
    if not stored and not config.get("tie_word_embeddings"):
        return checkpoint
    auto = model_class({**config, _CLASSES: None})
    name = auto._model_mapping[transformers.CONFIG_MAPPING[kind]].__name__
    note = f"config.json names {config[_CLASSES][0]}, a model without head; the head is there, so it is read as {name}."
    checkpoint.config = {**config, _CLASSES: [name]}
    checkpoint.notes = (*checkpoint.notes, note)
    return checkpoint


def is_headless(names: object) -> TypeGuard[list[str]]:
    """Whether the first of config.json's classes is a model below its head, by transformers' way to name them."""
    return isinstance(names, list) and bool(names) and isinstance(names[0], str) and names[0].endswith("Model")
