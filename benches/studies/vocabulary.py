"""Measures what compensating errors of the embedding and the head in the metric of their rows gains at equal bits.

    python -m benches.studies.vocabulary MODEL --texts FILE ... [--source built-in] [--bits 3 4] [--damping 0.1 0.5 1]
        [--windows 8] [--pieces 96] [--kept FILE] [--untied] --results FILE

Only the embedding and the head are packed; all layers keep their weights. Each is rounded to nearest, and solved in its
metric at each damping, with factors of rows and columns as in `auto` and a step at which it takes the given bits per
weight with all metadata. `--untied` gives a model whose head is the embedding a head of its own, and packs one of the
two at a time. One line of JSON is appended to the results per run: bits, loss increase and divergence by text.

`--pieces` is the number of pieces of the text on which sensitivity is measured. Only the ends are measured, so layers
need no gradients of weights. `--kept` names a file that keeps the measurement for other runs with the same model and
text.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benches.tools.scores import Kept, Scores
from moepack.calibration import CalibrationRequest, CalibrationSettings, fisher
from moepack.checkpoint import describe
from moepack.checkpoint.dense import EMBEDDING, DenseLinear
from moepack.checkpoint.quantized import open_checkpoint
from moepack.integrations.loading import open_model
from moepack.methods.rate.sample import stream_rows
from moepack.methods.rate.scales import Scales, scales_of
from moepack.methods.rate.step_size import encoded
from moepack.methods.rate.vocabulary import solved_rows
from moepack.solvers.balance import Balance, Matrices, balance
from moepack.solvers.priced import Profile, round_priced, scale_of, worth_of
from moepack.solvers.uniform import UniformSettings

TRIALS, EXACT = 6, 0.003
"""Maximum number of steps that are tried on a sample, and accuracy of its bits per weight."""
SAMPLED = 1 << 21
"""Weights of that sample."""


def untied(model: Path, out: Path) -> Path:
    """A copy of a model whose head is a copy of its embedding."""
    shutil.copytree(model, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    for file in out.glob("*.safetensors"):
        tensors = load_file(file)
        if (embedding := tensors.get("model.embed_tokens.weight")) is not None:
            save_file({**tensors, "lm_head.weight": embedding.clone()}, file, metadata={"format": "pt"})
            (out / "model.safetensors.index.json").unlink(missing_ok=True)
    return out


def measured(path: Path, source: str, pieces: int) -> dict[str, fisher.Sensitivity]:
    """The sensitivity of the embedding and the head."""
    checkpoint = open_checkpoint(path)
    model, owners, windows = describe(checkpoint), fisher.owners, fisher.WINDOWS
    samples = CalibrationRequest(source, 128, 512, CalibrationSettings()).load(checkpoint)
    balances = {linear.source: balanced(linear) for linear in ends(path)}
    try:
        fisher.WINDOWS = pieces
        fisher.owners = lambda *given: ((name, own) for name, own in owners(*given) if own.keys() & balances.keys())
        found = fisher.fisher(checkpoint, model, balances, samples, torch.device("cpu"))
    finally:
        fisher.owners, fisher.WINDOWS = owners, windows
    assert found is not None
    return found


def ends(path: Path) -> Iterator[DenseLinear]:
    """The embedding, and the head if it is another tensor."""
    for dense in describe(open_checkpoint(path)).dense:
        yield from (linear for linear in dense.linears if linear.role in (EMBEDDING, "head"))


def balanced(linear: DenseLinear) -> Balance:
    """The balance of an embedding or a head."""
    return balance([Matrices((1, *linear.shape), lambda _: linear.matrix())])[0]


class Tensors:
    """An embedding or a head, with the factors of `auto`."""

    def __init__(self, linear: DenseLinear, known: fisher.Sensitivity) -> None:
        self.matrix, self.metric = linear.matrix(), known.metric
        self.scales = scales_of(balanced(linear), known, tokens=True)
        rows, columns = self.matrix.shape
        height = stream_rows(columns)
        apart = max(rows * columns // SAMPLED, 1)
        some = (torch.arange(0, rows - height, height * apart)[:, None] + torch.arange(height)).flatten()
        self.sample = self.matrix[some], Scales(self.scales.rows[:, some], self.scales.columns)
        self.profile = Profile()
        self.profile.add(self.sample[1].scaled(0, self.sample[0]), len(self.matrix) / len(some))

    def at(self, bits: float, damping: float | None) -> tuple[Tensor, float]:
        """The values at a rate, and the bits per weight that they take; rounded without `damping`."""
        step = 0.5 * self.profile.mean_square**0.5
        for _ in range(TRIALS):
            taken = self._coded(*self.sample, step, damping)[1]
            if abs(taken - bits) < EXACT:
                break
            step *= 2 ** (taken - bits)
        codes, taken = self._coded(self.matrix, self.scales, step, damping)
        rows, columns = self.scales.stored(scale_of(step, True))
        return codes * rows[0, :, None] * columns[0], taken

    def _coded(self, matrix: Tensor, scales: Scales, step: float, damping: float | None) -> tuple[Tensor, float]:
        lengths = self.profile.lengths(step, worth_of(True), dependent=True)
        if damping is None or self.metric is None:
            codes = round_priced(scales.scaled(0, matrix), step, lengths, lengths.worth)
        else:
            settings = UniformSettings(largest=lengths.largest, even=True, damping=damping)
            codes = solved_rows(matrix, scales, self.metric, step, lengths, settings)
        size = 8 * encoded(codes[None].contiguous(), lengths.largest, True).nbytes + scales.bits
        return codes, size / codes.numel()


def rows(options: argparse.Namespace, path: Path) -> Iterator[Mapping[str, Any]]:
    """One row per tensor, rate and damping."""
    if options.kept is not None and options.kept.exists():
        known = {name: fisher.Sensitivity(*own) for name, own in torch.load(options.kept).items()}
    else:
        known = measured(path, options.source, options.pieces)
        if options.kept is not None:
            plain = {name: (own.mean, own.rows, own.columns, own.metric) for name, own in known.items()}
            torch.save(plain, options.kept)
    scores = Scores(path, options.texts, "cpu", options.windows)
    changed = open_model(path, torch.float32).eval()
    scores.original = Kept(scores.original)
    for linear in ends(path):
        tensors, parameter = Tensors(linear, known[linear.source]), changed.get_submodule(linear.name).weight
        for bits in options.bits:
            for damping in (None, *options.damping):
                parameter.data, taken = tensors.at(bits, damping)
                row = {"model": options.model.name, "untied": options.untied, "windows": options.windows}
                row |= {"pieces": options.pieces, "tensor": linear.source, "bits": bits}
                yield row | {"damping": damping, "taken": round(taken, 4), **scores.of(changed)}
        parameter.data = tensors.matrix.float()


def main() -> None:
    """Print each row, and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="evaluation texts")
    parser.add_argument("--source", default="built-in", help="calibration text")
    parser.add_argument("--bits", type=float, nargs="+", default=[3.0, 4.0])
    parser.add_argument("--damping", type=float, nargs="+", default=[0.5])
    parser.add_argument("--windows", type=int, default=8, help="windows per evaluation text")
    parser.add_argument("--pieces", type=int, default=fisher.WINDOWS)
    parser.add_argument("--kept", type=Path, help="file that keeps the measured sensitivity")
    parser.add_argument("--untied", action="store_true")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = untied(options.model, Path(folder) / "untied") if options.untied else options.model
        for row in rows(options, path):
            print(line := json.dumps(row), flush=True)
            with options.results.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
