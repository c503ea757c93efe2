"""Counts how many tokens of a calibration text reach each expert, and how well that covers other texts.

    python -m benches.studies.coverage MODEL --texts FILE ... --sources FILE ... [--samples 128] [--results FILE]

A source is a file, or `built-in`. For each source, prints the number of windows and, over all experts of all layers,
the smallest and the median number of tokens and the share of experts with fewer than `FEW`. For each text, prints which
share of its choices of experts falls on an expert with fewer than `FEW` tokens of the source, and the divergence of the
choices of the text from those of the source, in nats (mean over layers; one token is added to each count).

MODEL is a model of transformers that returns router logits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benches.tools.scores import windows
from moepack.calibration import token_windows
from moepack.integrations.loading import open_model, open_tokenizer

LENGTH = 512
"""Tokens per window."""
FEW = 64
"""Tokens below which `compress` names an expert in its notes."""


@torch.inference_mode()
def choices(model: Any, ids: Tensor, top_k: int) -> Tensor:
    """Return the number of tokens by layer and expert."""
    counts: list[Tensor] = []
    for batch in ids.split(8):
        routers = model(batch, output_router_logits=True, use_cache=False).router_logits
        for layer, logits in enumerate(routers):
            if len(counts) == layer:
                counts.append(torch.zeros(logits.shape[-1]))
            counts[layer] += torch.bincount(logits.topk(top_k).indices.flatten(), minlength=logits.shape[-1])
    return torch.stack(counts)


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row per source."""
    model, tokenizer = open_model(options.model, torch.float32).eval(), open_tokenizer(options.model)
    top_k = model.config.num_experts_per_tok
    texts = {
        text.stem: choices(model, windows(tokenizer, text, options.windows, LENGTH), top_k) for text in options.texts
    }
    for source in options.sources:
        ids = token_windows(tokenizer, str(source), options.samples, LENGTH, model.config.vocab_size)
        counts = choices(model, ids, top_k)
        row: dict[str, Any] = {"source": source.stem, "windows": len(ids)}
        row |= {"least": int(counts.min()), "median": int(counts.median())}
        row["few"] = round(float((counts < FEW).float().mean()), 4)
        own = (counts + 1) / (counts + 1).sum(-1, keepdim=True)
        for name, other in texts.items():
            share = (other + 1) / (other + 1).sum(-1, keepdim=True)
            missed = float(other[counts < FEW].sum() / other.sum())
            apart = float((share * (share / own).log()).sum(-1).mean())
            row[name] = {"missed": round(missed, 5), "divergence": round(apart, 4)}
        yield row


def main() -> None:
    """Print one line of JSON per source."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, nargs="+", required=True, help="texts that the source should cover")
    parser.add_argument("--sources", type=Path, nargs="+", required=True, help="calibration texts")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--windows", type=int, default=24, help="windows per text")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    found = []
    for row in rows(options):
        found.append(row)
        print(json.dumps(row), flush=True)
    if options.results is not None:
        options.results.write_text(json.dumps({"model": options.model.name, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
