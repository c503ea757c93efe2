"""The class of transformers that a checkpoint is loaded as, by its config.json. Code of the checkpoint is never run.

The class that config.json names is taken if transformers has it: it alone knows whether a model is a language model,
one that reads images, or one that labels tokens. Otherwise an auto class decides.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moepack.errors import UnsupportedModelError

__all__ = ["building", "configuration", "meta_model", "model_class"]

_AUTO = ("CausalLM", "ImageTextToText", "MultimodalLM", "Seq2SeqLM", "TokenClassification")
"""The auto classes in the order in which they are asked."""


def model_class(config: Mapping[str, Any]) -> Any:
    """The class, or auto class, whose `from_pretrained` loads a model of a configuration."""
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
    """Raise UnsupportedModelError, which names config.json, for any exception of a class of transformers."""
    try:
        yield
    except Exception as cause:  # a class raises whatever it makes of values that it does not expect
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())
        message = f"transformers cannot build the model ({reason})"
        raise UnsupportedModelError(message, file=checkpoint_path / "config.json") from cause


def configuration(checkpoint_path: Path, config: Mapping[str, Any]) -> Any:
    """The configuration of transformers for a config.json.

    Raises:
        UnsupportedModelError: the installed transformers does not know the model.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if config["model_type"] not in CONFIG_MAPPING:
        import transformers

        own = "; code that comes with a checkpoint is never run" if config.get("auto_map") else ""
        own += f" (version {transformers.__version__}; a newer one may)"
        raise UnsupportedModelError(f"the installed transformers does not know it{own}", file=checkpoint_path)
    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")}
    decode = getattr(PretrainedConfig, "_decode_special_floats", dict)
    return CONFIG_MAPPING[config["model_type"]].from_dict(decode(plain))


def meta_model(checkpoint_path: Path, config: Mapping[str, Any]) -> Any:
    """The model of a config.json, with shapes and without weights.

    Raises:
        UnsupportedModelError: as for `configuration`.
        Exception: whatever the model's constructor raises.
    """
    found, kind = configuration(checkpoint_path, config), model_class(config)
    build = getattr(kind, "from_config", None) or kind._from_config
    with torch.device("meta"):
        return build(found)
