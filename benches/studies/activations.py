"""Measures the loss of rounding activations to 4 bits, by kind of layer; weights are not quantized.

    python -m benches.studies.activations MODEL ... --text TEXT [--chars N] [--out FILE]

Each row rounds the inputs of one kind of layer, asymmetrically over a token's range: unchanged; clipped to 0.8 of the
range; or rotated by a Hadamard matrix in blocks of the largest power of two that divides the columns, and rotated back.
Prints loss differences from the original in nats per token, as JSON and a table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import moepack
from benches.tools import machine
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.solvers.activations import block_width, rotated, round_activations

ROLES = {
    "queries, keys, values": ("q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa"),
    "latents (kv_b)": ("kv_b_proj",),
    "output": ("o_proj",),
    "gate, up": ("gate_proj", "up_proj", "experts"),
    "down": ("down_proj", "experts_down"),
}
Change = Callable[[Tensor], Tensor]


def clipped(x: Tensor) -> Tensor:
    """Round over 0.8 of the range of each token."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
    step = ((high - low) * 0.8 / 15).clamp(min=1e-30)
    zero = (-low * 0.8 / step).round()
    return ((x / step + zero).round().clamp(0, 15) - zero) * step


def spread(x: Tensor) -> Tensor:
    """Rotate, round, rotate back."""
    width = block_width(x.shape[-1])
    return rotated(round_activations(rotated(x, width), 4), width)


CHANGES: dict[str, Change] = {"plain": lambda x: round_activations(x, 4), "clipped": clipped, "Hadamard": spread}


class Rounded:
    """A model with changes of its layers' inputs.

    Attributes:
        changes: by the last part of a module's path; "experts" and "experts_down" for the two inputs of experts.
    """

    def __init__(self, model: Any) -> None:
        self.changes: dict[str, Change] = {}
        self.kinds: set[str] = set()
        for path, module in model.named_modules():
            leaf = path.rsplit(".", 1)[-1]
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(lambda _, given, leaf=leaf: (self.seen(leaf, given[0]),))
                self.kinds.add(leaf)
            elif leaf == "experts":
                module.forward = self._experts(module)
                self.kinds |= {"experts", "experts_down"}

    def seen(self, kind: str, x: Tensor) -> Tensor:
        """The changed input of a layer of this kind."""
        change = self.changes.get(kind)
        return x if change is None else change(x)

    def _experts(self, module: Any) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            out, x = torch.zeros_like(hidden), self.seen("experts", hidden)
            for expert in range(len(module.down_proj)):
                tokens, place = torch.where(index == expert)
                if not len(tokens):
                    continue
                gate, up = functional.linear(x[tokens], module.gate_up_proj[expert]).chunk(2, -1)
                inner = self.seen("experts_down", module.act_fn(gate) * up)
                y = functional.linear(inner, module.down_proj[expert]) * weights[tokens, place, None]
                out.index_add_(0, tokens, y.to(out.dtype))
            return out

        return forward


def measure(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Losses of all rows."""
    model, tokenizer = open_model(path, torch.float32), open_tokenizer(path)
    rounded = Rounded(model)

    def loss() -> float:
        return moepack.evaluate(model, options.text, options.chars, tokenizer=tokenizer).loss

    found = {"original": loss()}
    for role, kinds in {**ROLES, "all": sum(ROLES.values(), ())}.items():
        if not rounded.kinds & set(kinds):
            continue
        for name, change in CHANGES.items():
            rounded.changes = dict.fromkeys(kinds, change)
            found[f"{role}/{name}"] = loss()
            print(path.name, role, name, f"{found[f'{role}/{name}'] - found['original']:+.4f}", flush=True)
    return found


def main() -> None:
    """Measure, save, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--chars", type=int, default=50_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/activations.json"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = json.loads(options.out.read_text())["figures"] if options.out.exists() else {}
    for model in options.models:
        figures[model.name] = measure(model, options)
        machine.save(options.out, options.threads, figures)
    for model, found in figures.items():
        print(f"| {model} | {' | '.join(CHANGES)} |\n|---|---|---|---|")
        for role in (*ROLES, "all"):
            cells = [found.get(f"{role}/{name}") for name in CHANGES]
            if cells[0] is not None:
                shown = " | ".join("" if cell is None else f"{cell - found['original']:+.4f}" for cell in cells)
                print(f"| {role} | {shown} |")


if __name__ == "__main__":
    main()
