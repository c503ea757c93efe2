"""The methods of `moepack compress`, and their settings as command-line options.

Settings that most people need come first. Settings of single methods are for research and have their own panels.

This module imports nothing heavy, so that `--help` stays fast. The tests check `METHODS_OF` against the methods.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from moepack.cli.placement import usable_device

METHODS = {
    "auto": "best quality at a given size (the default); better with a calibration text",
    "finequant": "group-wise integers of 8, 4, 3 or 2 bits; needs no text",
    "rate": "entropy-coded integers at any rate from 0.4 to 8 bits, all linear layers too; better with a text",
    "floe": "coarse copies compute and select the channels that 4-bit residuals refine; needs a text",
    "milo": "group-wise integers of 3 bits (or 2, 4, 8) with packed low-rank corrections; needs no text",
    "codequant": "fitted codebooks with codes of 4, 3 or 2 bits; activations of 8 or 4 bits; needs a text",
    "qmoe": "2-bit integers, or three values per row at 0.4 to 2 bits, calibrated; needs a text",
    "ternary": "three values per row at 0.6 to 1.3 bits, uncalibrated: smallest, with a large quality loss",
}
"""One-line description of each method."""

METHODS_OF = {
    "size": ("auto",),
    "ratio": ("auto",),
    "prefer": ("auto",),
    "code": ("ternary", "qmoe"),
    "calibration": ("auto", "rate", "qmoe", "codequant", "milo", "floe"),
    "samples": ("auto", "rate", "qmoe", "codequant", "milo", "floe"),
    "sequence_length": ("auto", "rate", "qmoe", "codequant", "milo", "floe"),
    "bits": ("finequant", "milo", "qmoe", "floe"),
    "bits_per_weight": ("auto", "rate", "qmoe", "finequant"),
    "roles": ("rate",),
    "codes": ("auto", "rate"),
    "group_size": ("finequant", "milo", "qmoe", "floe"),
    "dense_bits": ("finequant", "qmoe"),
    "symmetric": ("finequant", "milo"),
    "solver": ("milo", "qmoe", "floe"),
    "device": ("auto", "rate", "qmoe", "codequant", "milo", "floe"),
    "sparsity": ("floe",),
    "coarse_bits": ("floe",),
    "dense_layers": ("floe",),
    "paper_form": ("floe",),
    "up_bits": ("floe",),
    "alpha": ("finequant",),
    "search": ("finequant",),
    "scales": ("finequant",),
    "rank": ("milo",),
    "rank_bits": ("milo",),
    "refine": ("milo",),
    "memory_budget": ("milo",),
    "weight_bits": ("codequant",),
    "activation_bits": ("codequant",),
    "block": ("codequant",),
    "steps": ("codequant",),
    "rotation": ("codequant",),
    "hadamard": ("codequant",),
}
"""The methods that accept each setting."""

MAIN = ("size", "bits_per_weight", "ratio", "prefer", "calibration", "device")
"""Settings that most people need, listed among the command's own options."""

SHARED = "Research: settings of several methods"


def flag(setting: str) -> str:
    """Return the option of a setting: `--group-size` for `group_size`."""
    return "--" + setting.replace("_", "-")


def options_of(method: str) -> list[str]:
    """Return the options that a method accepts."""
    return [flag(setting) for setting, methods in METHODS_OF.items() if method in methods]


def refuse_foreign(method: str, given: Iterable[str]) -> None:
    """Reject settings that `method` does not accept. An unknown method passes: `create` rejects it.

    Raises:
        ValueError: the method does not accept a setting; the message lists those that it accepts.
    """
    foreign = [flag(setting) for setting in given if method not in METHODS_OF[setting]]
    if foreign and method in METHODS:
        raise ValueError(
            f"--method {method} does not take {', '.join(foreign)}; it takes {', '.join(options_of(method))}"
        )


def _number(text: str | None) -> int | str | None:
    """Convert decimal digits to an integer; return any other text unchanged."""
    return int(text) if text is not None and text.isdecimal() else text


def _option(setting: str, text: str, *declarations: str, **more: Any) -> Any:
    """Return the typer option of a setting, in the right panel: the command's own, its only method's, or the shared
    one, where the help names the methods."""
    methods, panel = METHODS_OF[setting], None
    if setting not in MAIN:
        panel = f"Research: --method {methods[0]}" if len(methods) == 1 else SHARED
        text = text if len(methods) == 1 else f"{', '.join(methods)}: {text}"
    return typer.Option(*declarations, help=text, rich_help_panel=panel, **more)


Size = Annotated[str | None, _option("size", "Total size of the weight files: 9GB, 7.5GiB, 5e9.")]
Ratio = Annotated[float | None, _option("ratio", "Size relative to the checkpoint: 0.25.")]
Prefer = Annotated[
    str | None, _option("prefer", "quality (default), or speed: formats that are fast on this machine, less accurate.")
]
Code = Annotated[str | None, _option("code", "entropy code, fsv8 (default) or dict16.")]
Calibration = Annotated[
    str | None,
    _option(
        "calibration",
        "Calibration text, like what the model will read: text file, JSON Lines, directory or Hub data set. By "
        "default, auto uses a built-in text if the model's largest layer fits in memory with gradients; none disables "
        "it.",
    ),
]
Samples = Annotated[int | None, _option("samples", "number of calibration windows; default 128, floe 64.", min=1)]
SequenceLength = Annotated[int | None, _option("sequence_length", "tokens per window; default 512.", min=1)]
Bits = Annotated[
    str | None,
    _option(
        "bits",
        "2, 3, 4 or 8; default 4 (finequant), 3 (milo). qmoe: ternary (default) or 2. floe: 4, 8 or 16; default 4, "
        "8 with --paper-form.",
    ),
]
BitsPerWeight = Annotated[
    float | None,
    _option(
        "bits_per_weight",
        "Average bits per weight: 2.5. Counts all weights; with --method rate, qmoe or finequant, the packed ones.",
    ),
]
GroupSize = Annotated[
    str | None,
    _option(
        "group_size",
        "columns per scale, 16 to 256; default 64. finequant also takes row, adaptive, adaptive-mean or budget.",
        callback=_number,
    ),
]
DenseBits = Annotated[
    str | None,
    _option("dense_bits", "also pack attention, shared experts and dense layers: 8, or attention=4,shared=8."),
]
Roles = Annotated[
    str | None,
    _option(
        "roles",
        "Layers to pack besides experts: all (default), none, or some of embedding,attention,shared,mlp,head.",
    ),
]
Codes = Annotated[str | None, _option("codes", "dependent (default): less error, at most a sixth slower; or plain.")]
WeightBits = Annotated[int | None, _option("weight_bits", "Bits per code: 2, 3 or 4; default 4.")]
ActivationBits = Annotated[
    int | None, _option("activation_bits", "Round the inputs of packed layers to 8 or 4 bits; default 16, no rounding.")
]
Block = Annotated[str | None, _option("block", "Columns per codebook, or row; default row.", callback=_number)]
Steps = Annotated[int | None, _option("steps", "Refinement passes over codes and centroids; default 4.", min=0)]
Alpha = Annotated[
    float | None, _option("alpha", "Threshold for --group-size adaptive (default 0.35) or adaptive-mean (0.87).")
]
Symmetric = Annotated[
    bool | None, _option("symmetric", "one scale per group, or a scale and an offset.", "--symmetric/--asymmetric")
]
Search = Annotated[
    bool | None, _option("search", "Search least-squares scales, or use the paper's.", "--search/--no-search")
]
Scales = Annotated[str | None, _option("scales", "Data type of the stored scales: float16 (default) or bfloat16.")]
Rotation = Annotated[str | None, _option("rotation", "Offline rotation: learned (default), random, hadamard or none.")]
Hadamard = Annotated[
    bool | None,
    _option("hadamard", "Rotate inputs online where no offline rotation applies; default with 4 activation bits."),
]
Solver = Annotated[
    str | None,
    _option(
        "solver", "lsq (default), hqq or rtn (milo); gptq (default) or rtn (qmoe); lsq or hqq (floe --paper-form)."
    ),
]
Sparsity = Annotated[
    float | None,
    _option(
        "sparsity", "Fraction of channels not refined, or skipped (--paper-form), per token; default 0.8.", min=0, max=1
    ),
]
CoarseBits = Annotated[
    float | None, _option("coarse_bits", "Bits per weight of coarse gate and down, 2 more for up; default 2.")
]
DenseLayers = Annotated[
    int | None,
    _option(
        "dense_layers",
        "Number of first layers that refine or compute all channels; default 0, 1 with --paper-form.",
        min=0,
    ),
]
PaperForm = Annotated[
    bool | None,
    _option(
        "paper_form",
        "The paper's form: low-bit up projections select channels, and the others are skipped. Faster on CPUs, with a "
        "much larger loss.",
        "--paper-form",
    ),
]
UpBits = Annotated[
    int | None,
    _option("up_bits", "With --paper-form: bits of the selecting up projections: 2 (default), 3, 4 or 8."),
]
Rank = Annotated[
    str | None, _option("rank", "Rank policy of the corrections, such as dense:512+kurtosis:16; default budget:5.")
]
RankBits = Annotated[int | None, _option("rank_bits", "Bits of the corrections: 3 (default), 8 or 16.")]
Refine = Annotated[
    bool | None, _option("refine", "Quantize corrections inside the loop, or after it.", "--refine/--no-refine")
]
MemoryBudget = Annotated[
    int | None, _option("memory_budget", "Total bytes of OUT's safetensors files, instead of --rank.", min=1)
]
Device = Annotated[
    str | None,
    _option("device", "Device for calibration and solvers: cpu (default) or cuda.", callback=usable_device),
]
