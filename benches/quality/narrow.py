"""Measures the loss of keys and values in 8 bits, and their memory.

    python -m benches.quality.narrow MODEL [MODEL ...] --text FILE [--text FILE] [--windows 8] [--length N] [--piece 64]
        [--device cuda] [--dtype float32] [--threads 1] [--out build/narrow.json]

The models, packed or not, read windows in pieces, so later pieces attend to the stored keys and values of earlier ones.
Without --length, a window has as many tokens as the model has positions, at most 2,048. Prints the loss with keys and
values in the model's dtype, the increase in 8 bits in nats per token with its standard error, and the bytes of a
token's keys and values in all layers, in bfloat16 and in 8 bits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benches.tools import machine
from benches.tools.scores import windows
from moepack.decoding.prefix import new_cache, set_kv_bits
from moepack.integrations.loading import open_model, open_tokenizer

LONGEST = 2048


@torch.inference_mode()
def losses(model: Any, texts: torch.Tensor, piece: int) -> tuple[torch.Tensor, Any]:
    """The losses of tokens but the first of each window, and the cache of the last window."""
    found, cache = [], None
    for ids in texts:
        cache, rows = new_cache(model), []
        for part in ids.split(piece):
            rows.append(model(part[None], past_key_values=cache, use_cache=True).logits[0].float())
        found.append(functional.cross_entropy(torch.cat(rows)[:-1], ids[1:], reduction="none"))
    return torch.cat(found).double().cpu(), cache


def row_bytes(cache: Any, wide: bool) -> int:
    """The bytes of a token's keys and values in all layers; `wide`: in bfloat16."""
    tensors = [each for layer in cache.layers for each in (layer.keys, layer.values)]
    return sum(each.shape[1] * each.shape[3] * (2 if wide else each.element_size()) for each in tensors)


def measured(path: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The figures of a model."""
    model, tokenizer = open_model(path, dtype=given.dtype, device=given.device), open_tokenizer(path)
    length = given.length or min(model.config.max_position_embeddings, LONGEST)
    figures: dict[str, Any] = {"model": path.name, "length": length, "windows": given.windows, "dtype": given.dtype}
    for text in given.text:
        texts, found = windows(tokenizer, text, given.windows, length).to(model.device), {}
        for bits in (None, 8):
            set_kv_bits(model, bits)
            found[bits], cache = losses(model, texts, given.piece)
            figures["bytes in 8 bits" if bits else "bytes in bfloat16"] = row_bytes(cache, wide=bits is None)
        more = found[8] - found[None]
        own = {"loss": found[None].mean(), "increase": more.mean(), "error": more.std() / len(more) ** 0.5}
        figures[text.stem] = {name: float(value) for name, value in own.items()}
        shown = "{loss:.4f} {increase:+.5f} (standard error {error:.5f})".format(**figures[text.stem])
        print(f"{path.name:<16} {text.stem:<16} {shown}", flush=True)
    print(f"{path.name:<16} bytes per token: {figures['bytes in bfloat16']}, {figures['bytes in 8 bits']} in 8 bits")
    return figures


def main() -> None:
    """Measure all models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--text", type=Path, required=True, action="append")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--length", type=int)
    parser.add_argument("--piece", type=int, default=64)
    parser.add_argument("--device", help="a device for a packed model; the CPU by default")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/narrow.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    found = [measured(model, given) for model in given.models]
    machine.save(given.out, given.threads, found, given.device or "cpu")


if __name__ == "__main__":
    main()
