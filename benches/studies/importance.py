"""Estimates the loss of replacing all tensors of a role by noise of equal strength, if the loss were quadratic.

    python -m benches.studies.importance MODEL [MODEL ...] --calibration FILE [--windows 8] [--threads 1]

Prints twice the nats per token: the sum over a role's tensors of the measured importance (`moepack.calibration.fisher`)
times the squares of the weights. Without a text, `auto` assumes one value for all models
(`moepack.methods.rate.importance.LOST`).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch

from moepack.calibration.fisher import fisher
from moepack.calibration.load import load_samples
from moepack.checkpoint import Checkpoint, MoeModel, describe
from moepack.methods.rate.importance import find_balances


def squares(model: MoeModel) -> Iterator[tuple[str, str, float]]:
    """Name, role and mean square of every tensor that can be packed, times its weights."""
    for layer in model.layers:
        for part in layer.projections:
            found = sum(float(part.expert(expert).float().square().sum()) for expert in range(layer.experts))
            yield part.packed_name, "experts", found
    for dense in model.dense:
        for linear in dense.linears:
            yield linear.source, linear.role, float(linear.matrix().float().square().sum())


def main() -> None:
    """Print one line per model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for path in options.models:
        checkpoint = Checkpoint.open(path)
        model = describe(checkpoint)
        samples = load_samples(checkpoint, options.calibration, options.windows, 256)
        found = fisher(checkpoint, model, find_balances(model), samples, torch.device("cpu"))
        assert found is not None, "a layer does not fit into memory with gradients, or the model reads two texts"
        lost: dict[str, float] = defaultdict(float)
        for name, role, square in squares(model):
            lost[role] += found[name].mean * square
        print(path.name, "  ".join(f"{role} {value:.2f}" for role, value in lost.items()), flush=True)


if __name__ == "__main__":
    main()
