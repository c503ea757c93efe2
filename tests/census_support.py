"""Skips architectures that the installed transformers lacks or cannot run itself."""

from functools import cache

import pytest
import torch
import transformers

from moepack.census import architectures
from moepack.census.tiny import tiny_model

IDS = torch.arange(36).mul(7).remainder(60).add(3).view(3, 12)
KNOWN = {name for types in architectures() for name in types}


def skip_unknown(model_type: str) -> None:
    if model_type not in KNOWN:
        pytest.skip("this version of transformers does not have it")
    outcome = run_by_transformers(model_type)
    if outcome:
        pytest.skip(f"transformers {transformers.__version__} does not run its own model: {outcome}")


@cache
def run_by_transformers(model_type: str) -> str:
    """The exception of transformers when it runs its own tiny model; empty if it runs."""
    try:
        model = tiny_model(model_type)
        with torch.inference_mode():
            model(input_ids=IDS, **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}))
    except Exception as error:  # any error of a broken model
        return f"{type(error).__name__}: {error}"
    return ""
