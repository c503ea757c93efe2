"""Tests one architecture: build, compress, load, run, generate, export, compare.

Comparisons use the median over tokens. The router of a random model is nearly undecided, so rounding sends single
tokens to other experts with different outputs.
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
from moepack.decoding.families import FAMILIES
from moepack.decoding.signature import cache_name, cached
from moepack.decoding.stepping import tried
from moepack.errors import MoepackError, UnsupportedModelError
from moepack.export import export
from moepack.integrations.loading import load
from moepack.methods import Method
from moepack.methods.finequant import FineQuant
from moepack.pipeline import compress

__all__ = ["EXPORTED", "FOLLOWED", "ORIGINAL", "Outcome", "architectures", "check", "core_decodes", "followed"]

ORIGINAL = 0.05
"""Maximum median relative error of a token's logits against the original, at 8 bits per weight."""
EXPORTED = 0.03
"""Maximum median relative error against the bf16 export: 8 bits of mantissa, through all layers."""
FOLLOWED = 1e-3
"""Maximum median relative error of the hidden states computed by calibration against the model's own."""

_TOWERS = ("vision_config", "audio_config", "vit_config")


@dataclass(frozen=True)
class Outcome:
    """The result of a test.

    Attributes:
        architecture: transformers' model type.
        verdict: "works", "text part only" (image and audio towers are not packed), "refused", "fails" (it loads, but
            computes something else than the original), or "not tried" (transformers cannot build it here).
        experts: kind of its experts modules (`checkpoint.experts`).
        original, exported: median relative errors of the logits against the original and the bf16 export.
        followed: median relative error of the hidden states after the last block computed by calibration, against the
            original's; None if calibrated methods reject the model.
        decoded: what runs decoding steps on the CPU: "core" or "transformers"; empty if the model cannot generate.
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
        """Whether the architecture works, with or without towers."""
        return self.verdict in ("works", "text part only")


@cache
def architectures() -> tuple[tuple[str, ...], ...]:
    """Return the architectures of the installed transformers with routed experts: model types of each, best first."""
    from transformers import CONFIG_MAPPING

    families: dict[str, list[str]] = {}
    for model_type in CONFIG_MAPPING:
        package, _, place = CONFIG_MAPPING[model_type].__module__.partition(".models.")
        if package == "transformers":  # others were registered by user code
            families.setdefault(place.split(".")[0], []).append(model_type)
    return tuple(tuple(_ranked(types)) for family, types in sorted(families.items()) if _has_experts(family))


def _has_experts(family: str) -> bool:
    """Return whether a model package of transformers defines experts, by its source code."""
    spec = find_spec(f"transformers.models.{family}")
    folders = spec.submodule_search_locations or [] if spec else []
    sources = [file.read_text(encoding="utf-8") for folder in folders for file in Path(folder).glob("modeling_*.py")]
    return any(re.search(r"^@use_experts_implementation|^class \w+Experts\(", text, re.M) for text in sources)


def _ranked(model_types: list[str]) -> Iterator[str]:
    """Yield the model types that have a model with a head, composite models first."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM

    autos = (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModelForSeq2SeqLM)
    for auto in autos:
        yield from (kind for kind in model_types if CONFIG_MAPPING[kind] in auto._model_mapping)
    if not any(CONFIG_MAPPING[kind] in auto._model_mapping for kind in model_types for auto in autos):
        yield model_types[0]


def check(model_types: tuple[str, ...], method: Method | None = None) -> Outcome:
    """Test an architecture.

    Args:
        model_types: its model types. The first one that transformers can build is tested.
        method: compression method; default: 8-bit group-wise integers, for which the limits here are chosen.
    """
    reason = ""
    for model_type in dict.fromkeys(model_types):
        try:
            model = tiny_model(model_type)
            logits = _logits(model)
        except Exception as error:  # architectures raise arbitrary exceptions for settings that they lack
            reason = reason or f"transformers cannot build a tiny model here ({_line(error)})"
            continue
        return _tried(model_type, model, logits, method or FineQuant(bits=8, calibration=None))
    return Outcome(model_types[0], "not tried", reason=reason)


def core_decodes() -> dict[str, str]:
    """Test every family that the core decodes on a tiny packed model; return what runs its steps, by model type."""
    found: dict[str, str] = {}
    for family in FAMILIES:
        try:
            model = tiny_model(family)
        except Exception as error:  # as in `check`
            found[family] = f"not tried: transformers cannot build a tiny model here ({_line(error)})"
            continue
        with tempfile.TemporaryDirectory(prefix="moepack-models-") as folder:
            model.save_pretrained(Path(folder) / "source")
            compress(Path(folder) / "source", Path(folder) / "packed", method=FineQuant(bits=8, calibration=None))
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
        except Exception as error:  # an unexpected failure is a row of the table and must not end it
            return Outcome(model_type, "fails", kinds, reason=f"{type(error).__name__}: {_line(error)}")
    towers = any(getattr(config, name, None) is not None for name in _TOWERS)
    verdict = "text part only" if towers else "works"
    if original > ORIGINAL or exported > EXPORTED or (states or 0) > FOLLOWED:
        verdict, reason = "fails", "logits or hidden states differ"
    return Outcome(model_type, verdict, kinds, original, exported, states, decoded, reason)


def _errors(folder: Path, model: Any, logits: torch.Tensor, method: Method) -> tuple[float, float, str]:
    """Return the errors of the packed model against the original and its bf16 export, and what decodes it."""
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
    """Return the median relative error of the hidden states that calibration computes block by block.

    Args:
        directory: directory of the checkpoint.
        model: the same model, loaded in float32.

    Raises:
        UnsupportedModelError: calibration cannot run the model.
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
    """Run the model token by token with a cache, if it has one, and with `generate`; return what runs its steps.

    Raises:
        ArithmeticError: the cache changes the outputs.
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
                raise ArithmeticError("the logits with a cache differ from those without")
    model.generate(ids, max_new_tokens=3, do_sample=False)
    return "core" if tried(model).taken else "transformers"


def _median(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def _kinds(model: torch.nn.Module) -> str:
    """Return the kinds of a model's experts modules."""
    forms = (form_of(module) for module in model.modules())
    return ", ".join(sorted({form.kind for form in forms if form is not None}))


def _line(error: Exception) -> str:
    """Return an error in one line, without temporary paths."""
    detail = error.detail if isinstance(error, MoepackError) else str(error)
    return " ".join(detail.split(". Supported are ")[0].split())[:200]
