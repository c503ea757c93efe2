"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Threads = Annotated[int | None, typer.Option(min=1, max=1024, help="Threads to use; default: all cores.")]
Resume = Annotated[bool, typer.Option(help="Continue an interrupted run of the same job; --no-resume starts over.")]
Check = Annotated[
    bool | None,
    typer.Option(
        help="Measure at the end what OUT loses on 2,000 tokens of the calibration text. By default if that takes "
        "less than a tenth of the time."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

Checkpoint = Annotated[
    str,
    typer.Argument(help="Directory of a checkpoint (safetensors), or a model of the hub: ORGANIZATION/NAME@REVISION."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop; nothing is written.")]
Report = Annotated[bool, typer.Option("--report", help="List what was chosen for every tensor.")]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Share the work with a Ray cluster: its address, auto for the one that this machine is in, or local "
        "for one of this machine's own. All nodes see MODEL under the same path and have this moepack; each task "
        "uses --threads cores. The same bytes as without. Needs the extra: pip install 'moepack[ray]'.",
    ),
]
MtpBits = Annotated[
    int | None, typer.Option(help="Bits for the experts of multi-token prediction; without, they are kept as they are.")
]

AnyModel = Annotated[Path, typer.Argument(help="Model directory or hub id (ORGANIZATION/NAME), packed or not.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or auto (the checkpoint's).")]
Mode = Annotated[str | None, typer.Option(help="Products of packed weights: auto, exact, bf16 or int8.")]
Resident = Annotated[
    bool, typer.Option("--resident", help="Copy the weights into memory first instead of mapping the files.")
]

TopP = Annotated[
    float | None, typer.Option(help="Draw among the likeliest tokens that together have this probability.")
]
TopK = Annotated[int | None, typer.Option(help="Draw among so many of the likeliest tokens; 0 among all.")]
MinP = Annotated[
    float | None, typer.Option(help="Leave out tokens below this share of the likeliest one's probability.")
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1, tokens that were there before become less likely.")
]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
System = Annotated[str | None, typer.Option(help="The system prompt: what the assistant should know or be.")]
