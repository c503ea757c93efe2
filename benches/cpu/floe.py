"""Measures FloE: the speed of sparse and dense products, and the loss.

    python -m benches.cpu.floe product [--threads 1] [--out build/floe-product.json]
    python -m benches.cpu.floe rules MODEL --calibration TEXT --text TEXT [--chars 12000] [--out build/floe.json]
    python -m benches.cpu.floe forms MODEL --calibration TEXT --text TEXT [--rescaled] [--out build/floe.json]
    python -m benches.cpu.floe packed MODEL --calibration TEXT --text TEXT [--chars 12000] [--out build/floe.json]
    python -m benches.cpu.floe equal MODEL --calibration TEXT --text TEXT [--chars 12000] [--out build/floe.json]
    python -m benches.cpu.floe recall MODEL --calibration TEXT --text TEXT [--chars 12000] [--out build/floe.json]
    python -m benches.cpu.floe table [--out build/floe.json]

`product` (`benches.cpu.floe_products`) runs one token through one expert of Mixtral (14,336 channels, 4,096 columns)
whose weights are in memory and not in a cache. The up projection has 2 bits and takes 8-bit activations, as in a model,
or exact ones; records have 4, 8 or 16 bits. Thresholds are quantiles of the outputs for the same tokens. Baselines are
the same layer without skipping, gate, up and down as ordinary tensors with the same bits and activations, and coarse
copies with residuals. The fastest call counts, by the processor time of one thread, otherwise by the clock.

`rules` measures the loss of a bf16 model whose experts skip channels by one of four rules (FloE, equations 3 to 5; the
first sparse layer is not sparse): the up projection's output, the gate's after SiLU, their product, or that times the
router's weight. Thresholds are quantiles over the calibration text, per expert, for the last rule per layer. All
weights are bf16, so this is the loss of the rule alone.

`forms` compares the default of `floe` with the paper's form: thresholds, sizes, loss, and the processor time to
compress a model and to generate a token. `packed` measures models packed by `floe`, with and without coarse copies, and
in 2 and 3 bits: bits per expert weight that stay in memory (selectors, coarse copies), bits that a token moves, and the
additional loss if guesses select channels (`--approximate`). `equal` compares the paper's form with coarse copies in
the same memory and with the same bytes moved: memory beyond the selectors holds the channels of each expert that are
stored first, which the calibration text used most, and only others are moved. The paper's form skips 50 to 80 %, with
up projections of 2 or 4 bits; the increase is interpolated between the points, and the better of both counts. `recall`
measures how much of a layer's demand can be guessed from the input of the preceding layer's experts: its experts by its
router, or by the linear map that best fits its router's logits on the calibration text; its channels by its up
projection, if the experts are known.

Figures are added to those in the file; `forms`, `packed` and `equal` do not measure its points again. `table` prints
the file as in the docs.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import moepack
from benches.cpu.floe_products import SHARES, product
from benches.tools import machine
from moepack import _core
from moepack.evaluation import evaluate
from moepack.format import PackedDirectory
from moepack.integrations.loading import open_model, open_tokenizer
from moepack.methods.floe.quantiles import Quantiles
from moepack.modules.foresight import foresee
from moepack.stores.mapped import MappedStore
from moepack.stores.streaming.channels import RECORDS

TOKENS = 24
"""Tokens of a timed generation."""
PARTS = 64
"""Parts of an expert's channels for counting requested ones."""
MEMORY = (2.7, 3.0, 3.5, 4.0)
"""Bits per expert weight in memory at which forms are compared."""

RULES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "gate": lambda gate, up, weight: gate,
    "up": lambda gate, up, weight: up,
    "down": lambda gate, up, weight: gate * up,
    "routed": lambda gate, up, weight: gate * up * weight,
}
"""Scores of channels from SiLU(gate) and up outputs [n, I] and router weights [n, 1]."""
POOLED = "routed"
"""The rule with one threshold for all experts of a layer."""


class Experts:
    """Replaces the `forward` of an unpacked experts module: counts magnitudes or skips channels.

    Attributes:
        module: whose.
        counts: by rule, while magnitudes are counted; None afterwards.
        rule, thresholds: what skips; without thresholds nothing is skipped.
    """

    def __init__(self, module: Any) -> None:
        self.module, self.rule = module, "up"
        self.counts: dict[str, Quantiles] | None = {rule: Quantiles(module.num_experts) for rule in RULES}
        self.thresholds: list[float] | None = None

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Replace the module's `forward`."""
        outputs = torch.zeros_like(x)
        for expert in index.unique().tolist():
            tokens, slots = (index == expert).nonzero(as_tuple=True)
            gate, up = (x[tokens] @ self.module.gate_up_proj[expert].T).chunk(2, dim=-1)
            gate = torch.nn.functional.silu(gate)
            hidden = gate * up
            weight = weights[tokens, slots, None]
            for rule, counts in (self.counts or {}).items():
                counts.add(expert, RULES[rule](gate, up, weight))
            if self.thresholds is not None:
                hidden = hidden * (RULES[self.rule](gate, up, weight).abs() >= self.thresholds[expert])
            outputs.index_add_(0, tokens, (hidden @ self.module.down_proj[expert].T) * weight)
        return outputs


@contextmanager
def stood_in(model: Any) -> Iterator[list[Experts]]:
    """The experts modules of an unpacked model with replaced `forward`."""
    modules = [
        module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "num_experts")
    ]
    stand_ins = [Experts(module) for module in modules]
    for module, stand_in in zip(modules, stand_ins, strict=True):
        module.forward = stand_in
    yield stand_ins
    for module in modules:
        del module.forward


def curves(options: argparse.Namespace) -> dict[str, Any]:
    """Loss by rule and share of skipped channels."""
    model, tokenizer = open_model(options.model, dtype=torch.float32), open_tokenizer(options.model)

    _core.set_threads(options.threads)

    def loss(text: Path) -> float:
        return evaluate(model, text, options.chars, tokenizer=tokenizer).loss

    with stood_in(model) as experts, torch.no_grad():
        loss(options.calibration)
        counts = [each.counts for each in experts]
        for each in experts:
            each.counts = None
        found: dict[str, Any] = {"whole": loss(options.text)}
        print(f"{options.model.name}: whole {found['whole']:.4f}", flush=True)
        for rule in RULES:
            found[rule] = {}
            for share in SHARES[1:]:
                for each, count in list(zip(experts, counts, strict=True))[1:]:
                    assert count is not None
                    experts_of = [
                        slice(None) if rule == POOLED else expert for expert in range(each.module.num_experts)
                    ]
                    each.rule, each.thresholds = rule, [count[rule].threshold(share, whose) for whose in experts_of]
                found[rule][f"{share:.1f}"] = loss(options.text) - found["whole"]
            print(f"{rule:>6}" + "".join(f"{value:>9.4f}" for value in found[rule].values()), flush=True)
    return found


class Seen:
    """The inputs of a layer's experts and its router's choices over a text.

    Attributes:
        module: the experts.
        router: the weights [E, H] of the layer's router.
    """

    def __init__(self, block: Any) -> None:
        self.module, self.router = block.experts, block.gate.weight.float()
        self._inputs: list[torch.Tensor] = []
        self._chosen: list[torch.Tensor] = []
        self.module.register_forward_pre_hook(self._note)

    def _note(self, module: Any, given: tuple[torch.Tensor, ...]) -> None:
        self._inputs.append(given[0].detach().float())
        self._chosen.append(given[1].detach())

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs [T, H] and choices [T, k] since the last call."""
        found = torch.cat(self._inputs), torch.cat(self._chosen)
        self._inputs.clear(), self._chosen.clear()
        return found


def recalled(logits: torch.Tensor, chosen: torch.Tensor) -> float:
    """The share of the chosen experts [T, k] that are among the k most likely by logits [T, E]."""
    guess = logits.topk(chosen.shape[1], dim=1).indices
    return float((chosen[:, :, None] == guess[:, None, :]).any(2).float().mean())


def channels_recalled(layer: Seen, x: torch.Tensor, before: torch.Tensor, chosen: torch.Tensor) -> float:
    """The share of the fifth of channels with the largest up outputs for x that have the largest for what came before.

    As many are guessed as there are, so precision is the same.
    """
    shares = []
    for expert in chosen.unique().tolist():
        tokens = (chosen == expert).any(1)
        up = layer.module.gate_up_proj[expert].float().chunk(2)[1]
        count = round((1 - 0.8) * len(up))
        true, guess = ((inputs[tokens] @ up.T).abs().topk(count, dim=1).indices for inputs in (x, before))
        wanted = torch.zeros(len(true), len(up), dtype=torch.bool).scatter_(1, true, True)
        shares.append(wanted.gather(1, guess).float().mean(1))
    return float(torch.cat(shares).mean())


@torch.no_grad()
def recall(options: argparse.Namespace) -> dict[str, list[float]]:
    """The predictability of each layer except the first on the text; maps are fitted on the calibration text."""
    model, tokenizer = open_model(options.model, dtype=torch.float32), open_tokenizer(options.model)
    blocks = [block for block in model.modules() if hasattr(block, "experts") and hasattr(block, "gate")]
    layers = [Seen(block) for block in blocks]
    evaluate(model, options.calibration, options.chars, tokenizer=tokenizer)
    learned = [layer.take() for layer in layers]
    evaluate(model, options.text, options.chars, tokenizer=tokenizer)
    unseen = [layer.take() for layer in layers]
    found: dict[str, list[float]] = {"router": [], "fitted": [], "channels": []}
    for at in range(1, len(layers)):
        router = layers[at].router
        before, (x, chosen) = unseen[at - 1][0], unseen[at]
        gram = learned[at - 1][0].T @ learned[at - 1][0]
        damped = gram + 1e-3 * gram.diag().mean() * torch.eye(len(gram))
        fit = torch.linalg.solve(damped, learned[at - 1][0].T @ (learned[at][0] @ router.T))
        found["router"].append(recalled(before @ router.T, chosen))
        found["fitted"].append(recalled(before @ fit, chosen))
        found["channels"].append(channels_recalled(layers[at], x, before, chosen))
    for name, values in found.items():
        print(f"{name:>9}" + "".join(f"{value:>7.2f}" for value in values), flush=True)
    return found


def measured(options: argparse.Namespace, method: str, **settings: Any) -> dict[str, Any]:
    """The loss of a packed model, and bits of an expert weight in its files, in memory, and that a token moves; of
    `floe` also its thresholds, the share of channels that they leave out of a text held out, and times."""
    with tempfile.TemporaryDirectory() as folder:
        out, start = Path(folder) / "packed", time.process_time()
        moepack.compress(options.model, out, method=moepack.methods.create(method, **settings))
        found: dict[str, Any] = {"compress_seconds": time.process_time() - start}
        model, tokenizer = moepack.load(out, dtype="float32"), open_tokenizer(options.model)
        found["loss"] = evaluate(model, options.text, options.chars, tokenizer=tokenizer).loss
        sparse = {name: module for name, module in model.named_modules() if hasattr(module, "computed")}
        resident = moved = files = weights = 0.0
        records = PackedDirectory.open(out).manifest.packed().values()
        for record in records:
            module, bits = sparse.get(record.module), 8 * record.nbytes
            files += bits
            if record.projection in RECORDS and module is not None:
                moved += bits * module.computed / module.asked
                continue
            resident += bits * (module is not None)
            moved += bits * (module is None)
            weights += math.prod(record.shape) * (3 if module is not None and len(module.projections) == 2 else 1)
        found |= {"files": files / weights, "resident": resident / weights, "moved": moved / weights}
        if sparse:
            found |= decided([record.details for record in records if record.projection in RECORDS])
            found["token_ms"] = generated(model)
            foresee(model, out, approximate=True)
            guessed = evaluate(model, options.text, options.chars, tokenizer=tokenizer).loss
            found["approximation"] = guessed - found["loss"]
        return found


def decided(layers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The minimum and maximum threshold of layers that skip channels, and the skipped share."""
    thresholds = [value for layer in layers for value in layer["thresholds"] if value != "infinity" and value > 0]
    left = [share for layer in layers for share in layer["achieved_sparsity"] if share is not None]
    return {"thresholds": [min(thresholds, default=0.0), max(thresholds, default=0.0)], "left": sum(left) / len(left)}


def generated(model: Any) -> float:
    """Milliseconds of processor time per generated token, the fastest of a few runs."""
    ids, best = torch.tensor([[1, 5, 7, 11]]), math.inf
    for _ in range(3):
        start = time.process_time()
        model.generate(ids, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False)
        best = min(best, time.process_time() - start)
    return 1e3 * best / TOKENS


class Counting(MappedStore):
    """Mapped bytes, with counts of requested channels by their position within the expert.

    Attributes:
        wanted: [PARTS], how many were wanted in each part of an expert's channels.
        asked: channels of the experts that tokens chose.
    """

    by_channels = True

    def __init__(self) -> None:
        self.wanted, self.asked = np.zeros(PARTS, np.int64), 0

    def channels(self, layer: Any, experts: torch.Tensor, ups: torch.Tensor) -> Iterator[torch.Tensor]:
        """Like those of every mapped store, with counts."""
        by_channel = (ups != 0).flatten(0, 1).sum(0).numpy()
        self.wanted += np.array([int(part.sum()) for part in np.array_split(by_channel, PARTS)])
        self.asked += ups.numel()
        yield ups


def spread(options: argparse.Namespace, **settings: Any) -> dict[str, Any]:
    """A packed model's loss, and bits per expert weight: of the deciding projections, of all records, of the
    requested ones by part."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "packed"
        text = {"calibration": str(options.calibration), "samples": options.samples}
        moepack.compress(options.model, out, method="floe", **text, **settings)
        model, store = moepack.load(out, dtype="float32"), Counting()
        sparse = {name: module for name, module in model.named_modules() if hasattr(module, "computed")}
        for module in sparse.values():
            module.store = store
        loss = evaluate(model, options.text, options.chars, tokenizer=open_tokenizer(options.model)).loss
        packed = PackedDirectory.open(out).manifest.packed().values()
        records = sum(8 * record.nbytes for record in packed if record.projection in RECORDS)
        others = sum(8 * record.nbytes for record in packed if record.projection not in RECORDS)
        weights = sum(3 * math.prod(module.shapes["up_proj"]) for module in sparse.values())
        wanted = store.wanted / store.asked * records / weights
        return {"loss": loss, "deciding": others / weights, "records": records / weights, "wanted": wanted.tolist()}


def moved(point: dict[str, Any], memory: float) -> float:
    """Bits per expert weight that a token moves if memory holds the given bits, including the deciding projections."""
    kept = PARTS * (memory - point["deciding"]) / point["records"]
    shares = np.clip(np.arange(1, PARTS + 1) - max(kept, 0), 0, 1)
    return float(shares @ np.array(point["wanted"]))


def equal(options: argparse.Namespace) -> dict[str, Any]:
    """The paper's form and coarse copies by memory and bytes moved."""
    whole = evaluate(
        open_model(options.model, dtype=torch.float32), options.text, options.chars,
        tokenizer=open_tokenizer(options.model),
    ).loss  # fmt: skip
    rows: dict[str, dict[str, Any]] = {"coarse 2 bits, 80 %": {}}
    for share in SHARES[1:-1]:
        paper = {"paper_form": True, "sparsity": share, "dense_layers": 0}
        rows |= {f"paper, up {bits} bits, {share:.0%}": {**paper, "up_bits": bits} for bits in (2, 4)}
    found = measured_before(options)
    for name, settings in rows.items():
        if name in found:
            continue
        point = spread(options, **settings)
        found[name] = {"increase": point.pop("loss") - whole, **point}
        print(f"{name:>24}: +{found[name]['increase']:.4f}, deciding {point['deciding']:.2f}", flush=True)
        add(options, found)
    compared(found)
    return found


def compared(found: dict[str, Any]) -> None:
    """Print the loss increase of both forms at equal memory and equal bytes moved, as table rows."""
    refined = found["coarse 2 bits, 80 %"]
    for memory in MEMORY:
        asked, best = moved(refined, memory), math.inf
        for bits in (2, 4):
            points = [point for name, point in found.items() if name.startswith(f"paper, up {bits} bits")]
            least_first = sorted((moved(point, memory), point["increase"]) for point in points)
            if points:
                best = min(best, float(np.interp(asked, *zip(*least_first, strict=True))))
        ratio = refined["increase"] / best
        print(f"| {memory:.1f} | {asked:.2f} | {refined['increase']:.3f} | {best:.3f} | {ratio:.2f} |")


def rescaled(model: Path, out: Path) -> Path:
    """Write a Mixtral checkpoint in other scales, powers of two close to a log-normal of deviation 1: norms against
    the inputs of experts, and rows of up projections against columns of down projections."""
    generator = torch.Generator().manual_seed(0)

    def powers(count: int) -> torch.Tensor:
        return 2.0 ** (1.44 * torch.randn(count, generator=generator)).round()

    shutil.copytree(model, out)
    for file in out.glob("*.safetensors"):
        tensors = {name: tensor.float() for name, tensor in load_file(file).items()}
        for name in sorted(name for name in tensors if name.endswith("post_attention_layernorm.weight")):
            layer, factors = name.removesuffix("post_attention_layernorm.weight"), powers(len(tensors[name]))
            tensors[name] *= factors
            for reader in (each for each in tensors if each.startswith(layer)):
                if reader.endswith((".gate.weight", ".w1.weight", ".w3.weight")):
                    tensors[reader] /= factors
        for up in sorted(name for name in tensors if name.endswith(".w3.weight")):
            factors = powers(len(tensors[up]))
            tensors[up] *= factors[:, None]
            tensors[up.replace(".w3.", ".w2.")] /= factors
        save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return out


def forms(options: argparse.Namespace) -> dict[str, Any]:
    """The default and the paper's form; a model in other scales has a separate name."""
    if options.rescaled:
        with tempfile.TemporaryDirectory() as folder:
            other = rescaled(options.model, Path(folder) / f"{options.model.name} in other scales")
            return forms(argparse.Namespace(**{**vars(options), "model": other, "rescaled": False}))
    text = {"calibration": str(options.calibration), "samples": options.samples}
    paper = {**text, "paper_form": True}
    return all_measured(options, {
        "the default": ("floe", text),
        "the paper's form, as it was the default": ("floe", paper),
        "the paper's form, every layer sparse": ("floe", {**paper, "dense_layers": 0}),
    })  # fmt: skip


def packed(options: argparse.Namespace) -> dict[str, Any]:
    """Compare packed models."""
    text = {"calibration": str(options.calibration), "samples": options.samples}
    paper = {**text, "paper_form": True, "dense_layers": 0}
    return all_measured(options, {
        "coarse 2 bits, 80 %, int4 residuals": ("floe", text),
        "coarse 2 bits, 90 %, int4 residuals": ("floe", {**text, "sparsity": 0.9}),
        "coarse 2 bits, 80 %, int8 residuals": ("floe", {**text, "bits": 8}),
        "coarse 1.25 bits, 80 %, int4 residuals": ("floe", {**text, "coarse_bits": 1.25}),
        "coarse 2 bits, 100 %": ("floe", {**text, "sparsity": 1.0}),
        "the paper's form, 80 %, int8": ("floe", paper),
        "the paper's form, 80 %, bf16": ("floe", {**paper, "bits": 16}),
        "the paper's form, 60 %, int8": ("floe", {**paper, "sparsity": 0.6}),
        "the paper's form, 80 %, int8, first layer whole": ("floe", {**paper, "dense_layers": 1}),
        "int2, offsets": ("finequant", {"bits": 2, "symmetric": False, "calibration": "none"}),
        "int3, offsets": ("finequant", {"bits": 3, "symmetric": False, "calibration": "none"}),
    })  # fmt: skip


def all_measured(options: argparse.Namespace, rows: Mapping[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Measure the missing rows, or those of `--only`; `whole` gives the loss of the original."""
    whole = evaluate(
        open_model(options.model, dtype=torch.float32), options.text, options.chars,
        tokenizer=open_tokenizer(options.model),
    ).loss  # fmt: skip
    found = measured_before(options)
    for name, (method, settings) in rows.items():
        if name in found or not name.startswith(options.only):
            continue
        figures = measured(options, method, **settings)
        found[name] = {"increase": figures.pop("loss") - whole, **figures}
        row = found[name]
        print(f"{name:>48}: +{row['increase']:.4f}, {row['resident']:.2f} + {row['moved']:.2f} bits", flush=True)
        add(options, found)
    return found


def measured_before(options: argparse.Namespace) -> dict[str, Any]:
    """The points of the command and the model that the file holds."""
    known = json.loads(options.out.read_text())["figures"] if options.out.exists() else {}
    found: dict[str, Any] = known.get(options.command, {}).get(options.model.name, {})
    return found


def add(options: argparse.Namespace, figures: Any) -> None:
    """Add figures to the file, by command and, if there is one, by model."""
    if options.out is None:
        return
    known = json.loads(options.out.read_text())["figures"] if options.out.exists() else {}
    model = getattr(options, "model", None)
    own = figures if model is None else {**known.get(options.command, {}), model.name: figures}
    machine.save(options.out, options.threads, {**known, options.command: own})


def table(options: argparse.Namespace) -> None:
    """Print the file's content as the tables of docs/methods/floe.md."""
    known = json.loads(options.out.read_text())["figures"]
    for model, found in known.get("rules", {}).items():
        for rule in RULES:
            print(f"| {model} | {rule} | " + " | ".join(f"{value:.3f}" for value in found[rule].values()) + " |")
    for model, found in known.get("recall", {}).items():
        for name, values in found.items():
            print(f"| {model} | {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
    for model, found in known.get("equal", {}).items():
        print(model)
        compared(found)
    for model, found in known.get("forms", {}).items():
        for name, row in found.items():
            least, most = row["thresholds"]
            bits = " | ".join(f"{row[key]:.2f}" for key in ("files", "resident", "moved"))
            times = f"{row['compress_seconds']:.0f} | {row['token_ms']:.1f}"
            print(f"| {model} | {name} | {least:.2g} to {most:.2g} | {row['left']:.1%} | {bits} | "
                  f"{row['increase']:.4f} | {times} |")  # fmt: skip
    models = known.get("packed", {})
    for name in dict.fromkeys(name for found in models.values() for name in found):
        cells = (
            f"{row['increase']:.3f} ({row['resident']:.2f} + {row['moved']:.2f})" if (row := found.get(name)) else ""
            for found in models.values()
        )
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Run the requested measurements and save them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    works: dict[str, Callable[[argparse.Namespace], Any]] = {
        "product": product, "rules": curves, "forms": forms, "packed": packed, "equal": equal, "recall": recall,
        "table": table,
    }  # fmt: skip
    for name in works:
        command = commands.add_parser(name)
        command.add_argument("--threads", type=int, default=1)
        command.add_argument("--out", type=Path, default=Path("build/floe.json"))
        if name in ("rules", "forms", "packed", "equal", "recall"):
            command.add_argument("model", type=Path)
            command.add_argument("--calibration", type=Path, required=True)
            command.add_argument("--text", type=Path, required=True)
            command.add_argument("--chars", type=int, default=12_000)
            command.add_argument("--samples", type=int, default=16)
            command.add_argument(
                "--rescaled", action="store_true", help="with `forms`: also measure a Mixtral model in other scales"
            )
            command.add_argument("--only", default="", help="measure rows whose names have this prefix")
    options = parser.parse_args()
    figures = works[options.command](options)
    if figures is not None and not getattr(options, "rescaled", False):
        add(options, figures)


if __name__ == "__main__":
    main()
