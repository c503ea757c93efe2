"""`moepack tune`: fine-tune what codes stand for, in a packed directory, against the model that it was made of."""

from pathlib import Path
from typing import Annotated

import typer

from moepack.cli import options
from moepack.cli.console import plain_console
from moepack.cli.device import usable_device
from moepack.cli.usage import wrong_usage


def tune_command(
    packed: Annotated[
        Path, typer.Argument(help="Packed directory of codebooks or coded integers (--method codequant, rate, auto).")
    ],
    original: Annotated[Path, typer.Argument(help="The checkpoint that it was made of: directory or hub id.")],
    out: Annotated[Path, typer.Argument(help="Directory to be made; it must not exist.")],
    calibration: Annotated[str, typer.Option(help="Text file, JSON lines, directory, or data set of the hub.")],
    samples: Annotated[int, typer.Option(min=2, help="Calibration samples.")] = 128,
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens a sample.")] = 512,
    steps: Annotated[int, typer.Option(min=1, help="Gradient steps.")] = 200,
    rate: Annotated[
        float,
        typer.Option(
            help="Learning rate, relative to a codebook's largest centroid; eight times that for scales, gains."
        ),
    ] = 5e-4,
    batch: Annotated[int, typer.Option(min=1, help="Samples a step.")] = 8,
    router_weight: Annotated[
        float, typer.Option(help="Weight of the divergence of the routers; that of the predictions is 1.")
    ] = 1.0,
    device: Annotated[
        str, typer.Option(callback=usable_device, help="Where both models run, in float32 and with gradients.")
    ] = "cpu",
    quiet: options.Quiet = False,
) -> None:
    """Fine-tune centroids, scales and gains of norms of PACKED towards the outputs of ORIGINAL.

    OUT has the same codes; codebooks keep their size, coded integers gain two bytes a row where rows are long. An
    interrupted run leaves nothing behind and cannot be continued.
    """
    from moepack.cli.evaluate import quiet_transformers
    from moepack.pipeline.tune import tune
    from moepack.progress import terminal_progress
    from moepack.tuning import TuneSettings

    quiet_transformers()
    console = plain_console(stderr=True)
    try:
        with wrong_usage():
            settings = TuneSettings(steps=steps, rate=rate, router_weight=router_weight, batch=batch)
            tuned = tune(
                packed, original, out, calibration=calibration, samples=samples, sequence_length=sequence_length,
                settings=settings, device=device, progress=terminal_progress(console, quiet),
            )  # fmt: skip
    except KeyboardInterrupt:
        console.print("interrupted; nothing was written, and the same command begins anew", soft_wrap=True)
        raise typer.Exit(130) from None
    for label, found in (("before", tuned.before), ("after", tuned.after)):
        print(f"{label:<7} predictions diverge by {found.logits:.5f} nats a token, routers by {found.routers:.5f}")
    print(f"wrote   {out}")
