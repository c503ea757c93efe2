"""The methods of `moepack compress` and their settings as options: which methods take each, and what it is there.

Settings that most people need come first; those of single methods are tools for research, in panels of their own.

`METHODS_OF` is checked against the methods themselves by the tests: here nothing heavy is imported, so that `--help`
is quick.
"""

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from moepack.cli.device import usable_device

METHODS = {
    "auto": "the best model of a size (the default); better with a text",
    "finequant": "8, 4, 3 or 2 bits in groups of columns; needs no text",
    "rate": "any number of bits from 0.4 to 8, entropy coded, all linear layers too; better with a text",
    "floe": "coarse copies compute, and choose the channels that 4-bit residuals refine; needs a text",
    "milo": "3 bits (2, 4, 8) with packed low-rank corrections; needs no text",
    "codequant": "4, 3 or 2-bit codes into fitted codebooks; activations of 8 or 4 bits; needs a text",
    "qmoe": "2 bits, or three values a row at 0.4 to 2 bits, calibrated; needs a text",
    "ternary": "three values a row, 0.6 to 1.3 bits, without calibration: tiny, and loses much of the model",
}
"""The methods, and what they make of weights."""

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
"""The methods that take each setting."""

MAIN = ("size", "bits_per_weight", "ratio", "prefer", "calibration", "device")
"""Settings that most people need; they stand first, among the options of the command itself."""

SHARED = "Research: settings of several methods"


def flag(setting: str) -> str:
    """The option of a setting: `--group-size` for `group_size`."""
    return "--" + setting.replace("_", "-")


def options_of(method: str) -> list[str]:
    """The options that a method takes."""
    return [flag(setting) for setting, methods in METHODS_OF.items() if method in methods]


def refuse_foreign(method: str, given: Iterable[str]) -> None:
    """Accept settings that `method` takes, or any of a method that is unknown.

    Raises:
        ValueError: the method does not take one of them; names those that it takes.
    """
    foreign = [flag(setting) for setting in given if method not in METHODS_OF[setting]]
    if foreign and method in METHODS:
        raise ValueError(
            f"--method {method} does not take {', '.join(foreign)}; it takes {', '.join(options_of(method))}"
        )


def _number(text: str | None) -> int | str | None:
    """A number where the text is one."""
    return int(text) if text is not None and text.isdecimal() else text


def _option(setting: str, text: str, *declarations: str, **more: Any) -> Any:
    """The option of a setting: among the command's own, in the panel of its only method, or in the shared one, where
    its methods are named."""
    methods, panel = METHODS_OF[setting], None
    if setting not in MAIN:
        panel = f"Research: --method {methods[0]}" if len(methods) == 1 else SHARED
        text = text if len(methods) == 1 else f"{', '.join(methods)}: {text}"
    return typer.Option(*declarations, help=text, rich_help_panel=panel, **more)


Size = Annotated[str | None, _option("size", "Size of all files of weights: 9GB, 7.5GiB, 5e9.")]
Ratio = Annotated[float | None, _option("ratio", "The size as a part of the checkpoint's: 0.25.")]
Prefer = Annotated[
    str | None, _option("prefer", "quality (default), or speed: formats whose products are fast here, at some loss.")
]
Code = Annotated[str | None, _option("code", "fsv8 (default) or dict16.")]
Calibration = Annotated[
    str | None,
    _option(
        "calibration",
        "Text like what the model will read: file, JSON lines, directory or data set of the hub. By default auto takes "
        "a built-in text if the model's largest layer fits into memory with gradients; none takes nothing.",
    ),
]
Samples = Annotated[int | None, _option("samples", "windows of the text; default 128, floe 64.", min=1)]
SequenceLength = Annotated[int | None, _option("sequence_length", "tokens a window; default 512.", min=1)]
Bits = Annotated[
    str | None,
    _option(
        "bits",
        "2, 3, 4 or 8; default 4 (finequant), 3 (milo). qmoe: ternary (default) or 2. floe: 4, 8 or 16; default 4, "
        "with --paper-form 8.",
    ),
]
BitsPerWeight = Annotated[
    float | None,
    _option(
        "bits_per_weight",
        "The size over the number of all weights: 2.5. With --method rate, qmoe or finequant: of what it packs.",
    ),
]
GroupSize = Annotated[
    str | None,
    _option(
        "group_size",
        "columns that share a scale, 16 to 256; default 64. finequant also: row, adaptive, adaptive-mean or budget.",
        callback=_number,
    ),
]
DenseBits = Annotated[
    str | None,
    _option("dense_bits", "pack attention, shared experts and dense layers too: 8, or attention=4,shared=8."),
]
Roles = Annotated[
    str | None,
    _option(
        "roles",
        "What is packed beside experts: all (default), none, or some of embedding,attention,shared,mlp,head.",
    ),
]
Codes = Annotated[
    str | None, _option("codes", "dependent (default): less error for a sixth of the speed at most; or plain.")
]
WeightBits = Annotated[int | None, _option("weight_bits", "2, 3 or 4 bits of a code; default 4.")]
ActivationBits = Annotated[
    int | None, _option("activation_bits", "Round what packed layers read to 8 or 4 bits; default 16, not at all.")
]
Block = Annotated[str | None, _option("block", "Columns that share a codebook, or row; default row.", callback=_number)]
Steps = Annotated[int | None, _option("steps", "How often codes and centroids are refined; default 4.", min=0)]
Alpha = Annotated[float | None, _option("alpha", "Threshold of --group-size adaptive (0.35), adaptive-mean (0.87).")]
Symmetric = Annotated[
    bool | None, _option("symmetric", "a scale a group, or an offset too.", "--symmetric/--asymmetric")
]
Search = Annotated[
    bool | None, _option("search", "Scales of least squared error, or the paper's.", "--search/--no-search")
]
Scales = Annotated[str | None, _option("scales", "Type of the stored scales, float16 (default) or bfloat16.")]
Rotation = Annotated[str | None, _option("rotation", "learned, random, hadamard or none; default learned.")]
Hadamard = Annotated[
    bool | None,
    _option("hadamard", "Turn inputs that no offline rotation reaches; the default with 4 activation bits."),
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
        "sparsity", "Share of channels that tokens do not refine, or skip (--paper-form); default 0.8.", min=0, max=1
    ),
]
CoarseBits = Annotated[
    float | None, _option("coarse_bits", "Bits a weight of coarse gate and down, 2 more of up; default 2.")
]
DenseLayers = Annotated[
    int | None,
    _option("dense_layers", "First layers that refine or compute all channels; default 0, 1 with --paper-form.", min=0),
]
PaperForm = Annotated[
    bool | None,
    _option(
        "paper_form",
        "The paper's form: low-bit up projections decide, and channels are skipped. Faster on CPUs; loses far more.",
        "--paper-form",
    ),
]
UpBits = Annotated[
    int | None, _option("up_bits", "With --paper-form: bits of up projections, which decide: 2 (default), 3, 4 or 8.")
]
Rank = Annotated[
    str | None, _option("rank", "Policies of the corrections, such as dense:512+kurtosis:16; default budget:5.")
]
RankBits = Annotated[int | None, _option("rank_bits", "Bits of the corrections: 3 (default), 8 or 16.")]
Refine = Annotated[
    bool | None, _option("refine", "Quantize corrections in the loop, or at its end.", "--refine/--no-refine")
]
MemoryBudget = Annotated[
    int | None, _option("memory_budget", "Bytes of all safetensors files of OUT, instead of --rank.", min=1)
]
Device = Annotated[
    str | None,
    _option("device", "Where a text is read and solvers run: cpu (default), cuda.", callback=usable_device),
]
