"""The list of models, in OpenAI's form with the facts that vLLM and llama.cpp add."""

from typing import Any

from moepack.serving.http.answers import Answers
from moepack.serving.text.prompts import positions

__all__ = ["entries"]


def entries(answers: Answers) -> list[dict[str, Any]]:
    """Return the models that requests may name."""
    engine = answers.engine
    meta = {"n_ctx": engine.context, "n_ctx_train": positions(engine.model), "n_vocab": engine.logits}
    common = {
        "object": "model",
        "created": answers.created,
        "owned_by": "moepack",
        "root": answers.settings.name,
        "max_model_len": engine.context,
        "permission": [],
        "meta": meta,
    }
    parent = answers.settings.name
    return [{"id": name, **common, "parent": None if name == parent else parent} for name in answers.models]
