"""Options shared by several commands."""

from pathlib import Path
from typing import Annotated

import typer

Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="CPU threads; default: all cores.")]
Resume = Annotated[bool, typer.Option(help="Continue an interrupted run of the same job, or start over.")]
Check = Annotated[
    bool | None,
    typer.Option(
        help="After packing, measure the loss increase of OUT on 2,000 tokens of the calibration text. Default: only "
        "for calibrated models of at least 10^8 weights, where it takes less than a tenth of the packing time."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

Checkpoint = Annotated[
    str,
    typer.Argument(
        help="Checkpoint directory, file of weights (safetensors, GGUF, PyTorch), or model of the Hugging Face Hub: "
        "ORGANIZATION/NAME[@REVISION], for a GGUF model with /FILE.gguf or a quantization such as :Q8_0."
    ),
]
Configuration = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="DIR",
        help="Folder of config.json and tokenizer for a file of weights. Default: the folder of the file if it has a "
        "config.json, otherwise the metadata of the GGUF file.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")]
KeepSource = Annotated[
    bool, typer.Option("--keep-source", help="Keep downloaded shards in the Hugging Face cache. Default: delete them.")
]
DiskBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Disk space for downloaded shards. Default: the three largest shards; all shards, if the method reads the "
        "weights several times and the disk has room.",
    ),
]
PreferPacked = Annotated[
    bool,
    typer.Option(
        "--prefer-packed",
        help="If the Hub has a packed version of MODEL of at most --size, download it instead of packing.",
    ),
]
Recipe = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="FILE",
        help="Take the method and all settings from a recipe: the recipe.yaml of a packed directory, or the directory. "
        "Options given beside it replace its entries.",
    ),
]
Prune = Annotated[
    str | None,
    typer.Option(
        metavar="SHARE",
        help="Leave out this share of each layer's experts, such as 25%: those that matter least on the calibration "
        "text (or the built-in text). `auto` leaves out none, an eighth or a quarter, whichever loses least. What the "
        "text does not show is lost with them: measure the result.",
    ),
]
PruneBy = Annotated[
    str | None,
    typer.Option(help="With --prune: drop the experts (default), or merge each into the most similar remaining one."),
]
Report = Annotated[bool, typer.Option("--report", help="List the format chosen for every tensor.")]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Distribute the work over a Ray cluster: its address, `auto` for this machine's cluster, or `local` for a "
        "new one on this machine. All nodes need this version of moepack, and MODEL at the same path if it is a "
        "directory. Each task uses --threads cores and, with --device cuda, a GPU. The output is the same as without "
        "--ray, if all processors have the same instruction sets. "
        "Needs pip install 'moepack[ray]'.",
    ),
]
MtpBits = Annotated[
    int | None, typer.Option(help="Bits for the experts of multi-token prediction layers; default: not packed.")
]

AnyModel = Annotated[Path, typer.Argument(help="Model directory or Hub id (ORGANIZATION/NAME), packed or not.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Data type of activations and unpacked weights: float32, bfloat16, float16 or `auto` (the checkpoint's)."
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        help="Precision of the computation with packed weights: `auto` (default; exact for few tokens, bf16 for many), "
        "`exact` (float32), `bf16`, or `int8` (activations of 8 bits)."
    ),
]
Resident = Annotated[
    bool, typer.Option("--resident", help="Read the weights into memory instead of mapping the files.")
]

TopP = Annotated[
    float | None, typer.Option(help="Sample from the most likely tokens whose probabilities add up to this.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from this many most likely tokens; 0 for all.")]
MinP = Annotated[
    float | None, typer.Option(help="Drop tokens less likely than this fraction of the most likely token.")
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Values above 1 make repeated tokens less likely.")]
Stop = Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")]
System = Annotated[str | None, typer.Option(help="System prompt.")]
