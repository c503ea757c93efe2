"""Chooses the transformers class that loads a checkpoint, from its config.json. Code in a checkpoint is never run.

The class named in config.json is used if transformers has it, because only it tells a language model from a model that
reads images or labels tokens. Otherwise an auto class decides.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moepack.errors import UnsupportedModelError
from moepack.memory import without_collector

__all__ = ["building", "configuration", "meta_model", "model_class"]

_AUTO = ("CausalLM", "ImageTextToText", "MultimodalLM", "Seq2SeqLM", "TokenClassification")
"""The auto classes, in the order in which they are tried."""


@without_collector()
def model_class(config: Mapping[str, Any]) -> Any:
    """Return the class or auto class whose `from_pretrained` loads a model with this configuration; imports it."""
    import transformers

    for name in config.get("architectures") or ():
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    if config.get("is_encoder_decoder"):
        return transformers.AutoModelForSeq2SeqLM
    kind, known = config["model_type"], transformers.CONFIG_MAPPING
    autos = [auto for name in _AUTO if (auto := getattr(transformers, f"AutoModelFor{name}", None)) is not None]
    return next((auto for auto in autos if kind in known and known[kind] in auto._model_mapping), autos[0])


@contextmanager
def building(checkpoint_path: Path) -> Iterator[None]:
    """Convert any exception of a transformers class to an `UnsupportedModelError` that names config.json."""
    try:
        yield
    except Exception as cause:  # model classes raise arbitrary exceptions for unexpected config values
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        message = f"transformers cannot build the model ({reason})"
        raise UnsupportedModelError(message, file=checkpoint_path / "config.json") from cause


def configuration(checkpoint_path: Path, config: Mapping[str, Any]) -> Any:
    """Return the transformers configuration for a config.json.

    Raises:
        UnsupportedModelError: the installed transformers does not support the model type.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if config["model_type"] not in CONFIG_MAPPING:
        import transformers

        own = "; code that comes with a checkpoint is never run" if config.get("auto_map") else ""
        own += f" (version {transformers.__version__}; a newer one may)"
        raise UnsupportedModelError(
            f"the installed transformers does not support this architecture{own}", file=checkpoint_path
        )
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    decode = getattr(PretrainedConfig, "_decode_special_floats", dict)
    return CONFIG_MAPPING[config["model_type"]].from_dict(decode(plain))


def meta_model(checkpoint_path: Path, config: Mapping[str, Any]) -> Any:
    """Build the model of a config.json on the meta device.

    Raises:
        UnsupportedModelError: as for `configuration`.
        Exception: any exception of the model's constructor.
    """
    found, kind = configuration(checkpoint_path, config), model_class(config)
    build = getattr(kind, "from_config", None) or kind._from_config
    with torch.device("meta"):
        return build(found)
