"""The settings of methods as options of `moepack compress`: which methods take each, and what it is there."""

from typing import Annotated

import typer

from moepack.cli.device import usable_device


def _number(text: str | None) -> int | str | None:
    """A number where the text is one."""
    return int(text) if text is not None and text.isdecimal() else text


Code = Annotated[str | None, typer.Option(help="ternary, qmoe: fsv8 or dict16; default fsv8.")]
Calibration = Annotated[
    str | None,
    typer.Option(help="qmoe, codequant, milo: text file, JSON lines, directory, or data set of the hub."),
]
Samples = Annotated[int | None, typer.Option(min=1, help="qmoe, codequant, milo: calibration samples; default 128.")]
SequenceLength = Annotated[int | None, typer.Option(min=1, help="qmoe, codequant, milo: tokens a sample; default 512.")]
Bits = Annotated[
    str | None,
    typer.Option(help="qmoe: ternary or 2, default ternary. finequant, milo: 2, 3, 4 or 8, default 4, 3."),
]
BitsPerWeight = Annotated[
    float | None,
    typer.Option(help="qmoe: rate of the coded experts, 0.4 to 2. finequant: budget of --group-size budget."),
]
GroupSize = Annotated[
    str | None,
    typer.Option(
        callback=_number,
        help="finequant: 16 to 256, row, adaptive[-mean] or budget; default 64. qmoe, milo: 16 to 256.",
    ),
]
DenseBits = Annotated[
    str | None,
    typer.Option(
        help="finequant, qmoe: bits of attention, shared experts and dense layers: 8, or attention=4,shared=8."
    ),
]
WeightBits = Annotated[int | None, typer.Option(help="codequant: 2, 3 or 4 bits of a code; default 4.")]
ActivationBits = Annotated[
    int | None,
    typer.Option(help="codequant: round what packed layers read to 8 or 4 bits; default 16, not at all."),
]
Block = Annotated[
    str | None, typer.Option(callback=_number, help="codequant: columns that share a codebook, or row; default row.")
]
Steps = Annotated[int | None, typer.Option(min=0, help="codequant: refinements of codes and centroids.")]
Alpha = Annotated[float | None, typer.Option(help="finequant: of adaptive (0.35), adaptive-mean (0.87).")]
Symmetric = Annotated[
    bool | None,
    typer.Option("--symmetric/--asymmetric", help="finequant, milo: a scale a group, or an offset too."),
]
Search = Annotated[
    bool | None,
    typer.Option("--search/--no-search", help="finequant: scales of least squared error, or the paper's."),
]
Scales = Annotated[str | None, typer.Option(help="finequant: stored scales, float16 (default) or bfloat16.")]
Rotation = Annotated[str | None, typer.Option(help="codequant: learned, random, hadamard or none; default learned.")]
Hadamard = Annotated[
    bool | None,
    typer.Option(help="codequant: turn inputs that no offline rotation reaches; default with 4 activation bits."),
]
Solver = Annotated[str | None, typer.Option(help="milo: lsq (default), hqq or rtn. qmoe: gptq (default) or rtn.")]
Rank = Annotated[
    str | None,
    typer.Option(help="milo: policies of the compensators, such as dense:512+kurtosis:16; default budget:5."),
]
RankBits = Annotated[int | None, typer.Option(help="milo: bits of the compensators: 3 (default), 8 or 16.")]
Refine = Annotated[
    bool | None,
    typer.Option("--refine/--no-refine", help="milo: quantize compensators in the loop, or at its end."),
]
MemoryBudget = Annotated[
    int | None, typer.Option(min=1, help="milo: bytes of all safetensors files of OUT, instead of --rank.")
]
Device = Annotated[
    str | None,
    typer.Option(
        callback=usable_device, help="qmoe, codequant, milo: where the model or the solver runs; default cpu."
    ),
]
