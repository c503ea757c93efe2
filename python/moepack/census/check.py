"""The trial of one architecture: build, compress, load, run, generate, export, compare.

Comparisons take the median over tokens: the router of a random model is undecided, so rounding sends single tokens to
other experts, whose outputs are unlike.
"""

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from moepack.calibration import CalibrationSettings, Calibrator, Samples
from moepack.census.tiny import VOCABULARY, tiny_model
from moepack.checkpoint import Checkpoint, describe
from moepack.checkpoint.classes import model_class
from moepack.checkpoint.experts import form_of
from moepack.errors import MoepackError, UnsupportedModelError
from moepack.export import export
from moepack.integrations.loading import load
from moepack.methods import Method
from moepack.methods.finequant import FineQuant
from moepack.pipeline import compress
from moepack.runtime.calls import cache_name, cached
from moepack.runtime.families import FAMILIES
from moepack.runtime.stepping import tried

__all__ = ["EXPORTED", "FOLLOWED", "ORIGINAL", "Outcome", "architectures", "check", "core_decodes", "followed"]

ORIGINAL = 0.05
"""The largest median of the relative error of a token's logits, beside the original: 8 bits a weight."""
EXPORTED = 0.03
"""The largest median of it beside the bf16 export: 8 bits of mantissa, through all layers."""
FOLLOWED = 1e-3
"""The largest median of the relative error of hidden states that calibration computes, beside the model's own."""

_TOWERS = ("vision_config", "audio_config", "vit_config")


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        architecture: transformers' model type.
        verdict: "works", "text part only" (towers for images or sound stay as they are), "refused", "fails" (loaded,
            but not what the original computes), or "not tried" (transformers does not build it here).
        experts: the kind of its experts modules (`checkpoint.experts`).
        original, exported: medians of the relative errors of logits beside the original and beside the bf16 export.
        followed: that of the hidden states behind the last block as calibration computes them, beside the original's;
            None where methods that run the model refuse it.
        decoded: what takes decoding steps on the CPU: "core", "transformers"; empty where it generates nothing.
        reason: why it does not work, or is not calibrated.
    """

    architecture: str
    verdict: str
    experts: str = ""
    original: float | None = None
    exported: float | None = None
    followed: float | None = None
    decoded: str = ""
    reason: str = ""

    @property
    def works(self) -> bool:
        """Whether it does, with or without towers."""
        return self.verdict in ("works", "text part only")


@cache
def architectures() -> tuple[tuple[str, ...], ...]:
    """The architectures of the installed transformers that have routed experts: the model types of each, best first."""
    from transformers import CONFIG_MAPPING

    families: dict[str, list[str]] = {}
    for model_type in CONFIG_MAPPING:
        package, _, place = CONFIG_MAPPING[model_type].__module__.partition(".models.")
        if package == "transformers":  # others were registered by a program
            families.setdefault(place.split(".")[0], []).append(model_type)
    return tuple(tuple(_ranked(types)) for family, types in sorted(families.items()) if _has_experts(family))


def _has_experts(family: str) -> bool:
    """Whether a package of transformers' models has a module of experts, by its source."""
    spec = find_spec(f"transformers.models.{family}")
    folders = spec.submodule_search_locations or [] if spec else []
    sources = [file.read_text() for folder in folders for file in Path(folder).glob("modeling_*.py")]
    return any(re.search(r"^@use_experts_implementation|^class \w+Experts\(", text, re.M) for text in sources)


def _ranked(model_types: list[str]) -> Iterator[str]:
    """Model types that have a model with a head: first those around others."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    autos = (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModelForSeq2SeqLM)
    for auto in autos:
        yield from (kind for kind in model_types if CONFIG_MAPPING[kind] in auto._model_mapping)
    if not any(CONFIG_MAPPING[kind] in auto._model_mapping for kind in model_types for auto in autos):
        yield model_types[0]


def check(model_types: tuple[str, ...], method: Method | None = None) -> Outcome:
    """Try an architecture.

    Args:
        model_types: its model types; the first that transformers builds is tried.
        method: what compresses it; group-wise integers of 8 bits by default, which the limits here are for.
    """
    reason = ""
    for model_type in dict.fromkeys(model_types):
        try:
            model = tiny_model(model_type)
            logits = _logits(model)
        except Exception as error:  # whatever an architecture of transformers raises where it lacks something
            reason = reason or f"transformers does not build a tiny one here ({_line(error)})"
            continue
        return _tried(model_type, model, logits, method or FineQuant(bits=8))
    return Outcome(model_types[0], "not tried", reason=reason)


def core_decodes() -> dict[str, str]:
    """Try every family that the core decodes on a tiny packed model: who takes its steps here, by model type."""
    found: dict[str, str] = {}
    for family in FAMILIES:
        try:
            model = tiny_model(family)
        except Exception as error:  # as in `check`
            found[family] = f"not tried: transformers does not build a tiny one here ({_line(error)})"
            continue
        with tempfile.TemporaryDirectory(prefix="moepack-models-") as folder:
            model.save_pretrained(Path(folder) / "source")
            compress(Path(folder) / "source", Path(folder) / "packed", method=FineQuant(bits=8))
            found[family] = str(tried(load(Path(folder) / "packed")))
    return found


def _tried(model_type: str, model: Any, logits: torch.Tensor, method: Method) -> Outcome:
    config, kinds, reason = model.config, _kinds(model), ""
    states: float | None = None
    with tempfile.TemporaryDirectory(prefix="moepack-models-") as folder:
        try:
            original, exported, decoded = _errors(Path(folder), model, logits, method)
            try:
                states = followed(Path(folder) / "source", model)
            except UnsupportedModelError as error:
                reason = _line(error)
        except MoepackError as error:
            return Outcome(model_type, "refused", kinds, reason=_line(error))
        except Exception as error:  # a failure that moepack did not foresee is part of the table, not the end of it
            return Outcome(model_type, "fails", kinds, reason=f"{type(error).__name__}: {_line(error)}")
    towers = any(getattr(config, name, None) is not None for name in _TOWERS)
    verdict = "text part only" if towers else "works"
    if original > ORIGINAL or exported > EXPORTED or (states or 0) > FOLLOWED:
        verdict, reason = "fails", "logits or hidden states differ"
    return Outcome(model_type, verdict, kinds, original, exported, states, decoded, reason)


def _errors(folder: Path, model: Any, logits: torch.Tensor, method: Method) -> tuple[float, float, str]:
    """Errors of the packed model beside the original and beside its bf16 export, and what decodes it."""
    model.save_pretrained(folder / "source")
    compress(folder / "source", folder / "packed", method=method)
    packed = load(folder / "packed", dtype="float32", mode="exact")
    found = _logits(packed)
    decoded = _run_with_cache(packed, found)
    export(folder / "packed", folder / "plain")
    kind = model_class(packed.config.to_dict())
    plain = kind.from_pretrained(folder / "plain", dtype=torch.float32).eval()
    return _median(found, logits), _median(found, _logits(plain)), decoded


def followed(directory: Path, model: Any) -> float:
    """The median of the relative error of the hidden states that calibration computes block by block.

    Args:
        directory: of the checkpoint.
        model: the same model, loaded, in float32.

    Raises:
        UnsupportedModelError: calibration does not know how to run the model.
    """
    checkpoint, inputs = Checkpoint.open(directory), _inputs(model)
    described, everywhere = describe(checkpoint), torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    samples = Samples(*(part for ids in inputs.values() for part in (ids, everywhere)))
    calibrator = Calibrator(checkpoint, described, samples, CalibrationSettings(batch=1, group=3))
    for run in calibrator.layers({layer.name: layer for layer in described.dense}):
        run.keep()
    seen: list[torch.Tensor] = []
    last = getattr(model.get_submodule(calibrator.stack.name), calibrator.stack.list_name)[-1]
    hook = last.register_forward_hook(lambda _, given, out: seen.append(out[0] if isinstance(out, tuple) else out))
    _logits(model)
    hook.remove()
    return _median(calibrator.hidden.tokens, seen[0].flatten(2).flatten(0, 1))


def _inputs(model: Any) -> dict[str, torch.Tensor]:
    ids = torch.arange(24).mul(7).remainder(VOCABULARY - 4).add(3).view(2, 12)
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})


def _logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(**_inputs(model)).logits
    return logits


def _run_with_cache(model: Any, logits: torch.Tensor) -> str:
    """Token by token with a cache, where the model has one, and through `generate`; what takes its steps.

    Raises:
        ArithmeticError: the cache changes what the model computes.
    """
    inputs = _inputs(model)
    if not model.can_generate() or model.config.is_encoder_decoder:
        return ""
    ids = inputs["input_ids"]
    with torch.inference_mode():
        first = model(input_ids=ids[:, :8], use_cache=True)
        if cached(first) is not None:
            name, rest = str(cache_name(type(model).forward)), [first]
            for token in range(8, 12):
                rest.append(model(input_ids=ids[:, token : token + 1], **{name: cached(rest[-1])}))
            if _median(torch.cat([step.logits for step in rest], 1), logits) > EXPORTED:
                raise ArithmeticError("with a cache the logits are others than without")
    model.generate(ids, max_new_tokens=3, do_sample=False)
    return "core" if tried(model).taken else "transformers"


def _median(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def _kinds(model: torch.nn.Module) -> str:
    """The kinds of a model's experts modules."""
    forms = (form_of(module) for module in model.modules())
    return ", ".join(sorted({form.kind for form in forms if form is not None}))


def _line(error: Exception) -> str:
    """An error in one line, without places that are gone."""
    detail = error.detail if isinstance(error, MoepackError) else str(error)
    return " ".join(detail.split(". Supported are ")[0].split())[:200]
