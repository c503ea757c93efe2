"""The plan that `moepack compress` prints before it starts."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moepack.cli.plan import download_text
from moepack.methods import METHODS
from moepack.units import duration, nats, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moepack.methods.preference import Preference
    from moepack.pipeline.estimate import Estimate, Part

__all__ = ["print_plan"]

NEAR = 0.02
"""Difference of speeds below which preferences are not compared."""


def print_plan(estimate: "Estimate", console: Console) -> None:
    """Print a table on a terminal, or one plain line per row in a log."""
    rows = _rows(estimate)
    if not console.is_terminal:
        for label, text in rows:
            console.print(f"plan: {label:<9} {text}", soft_wrap=True, markup=False, highlight=False)
        return
    table = Table(title="Plan", title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, Text(text))
    console.print(table)


def _rows(plan: "Estimate") -> list[tuple[str, str]]:
    shown = {name: value for name, value in plan.settings.items() if value not in ("", None)}
    settings = ", ".join(f"{name} {value}" for name, value in shown.items() if not isinstance(value, dict))
    rows = [
        ("model", f"{plan.model} ({plan.architecture}: {plan.layers} layers of {plan.experts} experts)"),
        ("method", f"{plan.method}: {METHODS[plan.method].summary if plan.method in METHODS else ''}"),
        ("settings", settings),
        *(("packs", _part(part)) for part in plan.parts),
        ("keeps", f"everything else unchanged: {size(plan.kept)}"),
        ("size", f"{size(plan.before)} -> about {size(plan.after)} ({plan.before / max(plan.after, 1):.2f}x smaller)"),
        *_goal(plan),
        *preference_rows(plan.preferences, plan.settings.get("prefer", ""), plan.run_memory),
        ("memory", f"about {size(plan.memory)} to compress, {_left(plan.free_memory, plan.memory)}"),
        *_download(plan),
        ("disk", f"writes up to {size(plan.disk)}, {_left(plan.free_disk, plan.disk)}"),
        ("time", _time(plan)),
        ("runs", _running(plan)),
        *(("note", note) for note in plan.notes),
    ]
    return rows


def _goal(plan: "Estimate") -> list[tuple[str, str]]:
    """Return the requested size and the expected loss, as far as they are known."""
    rows = []
    if plan.goal is not None and plan.goal.reason:
        rows.append(("goal", f"{size(plan.goal.nbytes)} of weights: {plan.goal.reason}"))
    if plan.plan is not None:
        rows.append(("loss", _loss(plan.plan.loss)))
    elif plan.goal is not None:
        rows.append(("loss", "unknown before the weights are read"))
    return rows


def _download(plan: "Estimate") -> list[tuple[str, str]]:
    """Return how a model on the Hub is downloaded."""
    return [] if plan.streaming is None else [("download", download_text(plan.streaming))]


def _part(part: "Part") -> str:
    """Return the weights, the bytes before and after, and the rate of a part."""
    about = "" if part.exact else "about "
    rate = f"{about}{part.bits_per_weight:.2f} bits per weight"
    return f"{part.role}: {part.weights:,} weights, {size(part.before)} -> {about}{size(part.after)} ({rate})"


def _left(free: int | None, need: int) -> str:
    """Return the free bytes, with a warning if they may not suffice."""
    if free is None:
        return "free amount unknown"
    return f"{size(free)} free" + ("" if free >= need else ": this may be TOO LITTLE")


def _loss(loss: tuple[float, float] | None) -> str:
    """Return the expected increase of the loss."""
    if loss is None:
        return "unknown without calibration; a text (`--calibration`) estimates it and about halves the loss"
    least, most = loss
    return f"+{least:.2g} to +{most:.2g} nats per token"


def preference_rows(
    preferences: "Sequence[Preference]", prefer: str, memory: int | None = None
) -> list[tuple[str, str]]:
    """Return a line for each preference, and one for what the chosen one costs; `memory` is what all of them need."""
    if not preferences:
        return []
    rows = []
    for each in preferences:
        loss = "" if each.loss is None else f"loss {nats(each.loss)}, "
        runs = "" if memory is None else f", {size(memory)} of memory"
        mark = " (chosen)" if each.name == prefer else ""
        rows.append(("prefer", f"{each.name}: {loss}{each.tokens_per_second:.3g} tokens/s{runs}{mark}"))
    return [*rows, ("costs", cost_text(preferences, prefer))]


def cost_text(preferences: "Sequence[Preference]", prefer: str) -> str:
    """Say what the chosen preference costs compared with the others."""
    named = {each.name: each for each in preferences}
    chosen = named[prefer]
    others = [each for each in preferences if each is not chosen and abs(each.seconds / chosen.seconds - 1) > NEAR]
    if not others:
        return "nothing: all preferences decode at about this speed"
    return f"{prefer} " + "; ".join(_compared(chosen, each) for each in others)


def _compared(chosen: "Preference", other: "Preference") -> str:
    text = f"decodes at {other.seconds / chosen.seconds:.2g} times the speed of {other.name}"
    if chosen.loss and other.loss:
        text += f", with {chosen.loss / other.loss:.2g} times its loss"
    return text


def _running(plan: "Estimate") -> str:
    speed = "speed unknown until `moepack doctor` has measured this machine"
    if plan.tokens_per_second is not None:
        speed = f"about {plan.tokens_per_second:.3g} tokens/s ({plan.target})"
    return f"in about {size(plan.run_memory)} of memory; {speed}"


def _time(plan: "Estimate") -> str:
    if plan.seconds is None:
        return "not estimated on this device"
    threads = f"{plan.threads} thread{'s' if plan.threads > 1 else ''}"
    text = f", {duration(plan.text_seconds)} of it for the calibration text" if plan.text_seconds else ""
    return f"about {duration(plan.seconds)} with {threads}{text}"
