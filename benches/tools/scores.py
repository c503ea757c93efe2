"""Measures loss and divergence of a model relative to the original, on windows of texts.

Windows are taken from the beginning of a text. Each is read by itself, and every token but its first is predicted.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moepack.integrations.loading import open_model, open_tokenizer

WINDOW, SCORED = 512, 40
"""Tokens per scored window, and windows per text."""


class Scores:
    """Compares models with the original on several texts."""

    def __init__(self, path: Path, texts: list[Path], device: str, count: int = SCORED) -> None:
        """Load the model at `path` and `count` windows of each text."""
        self.device, tokenizer = device, open_tokenizer(path)
        self.original = open_model(path, torch.float32).to(device).eval()
        self.windows = {text.stem: windows(tokenizer, text, count, WINDOW) for text in texts}

    @torch.inference_mode()
    def of(self, model: Any) -> dict[str, dict[str, float]]:
        """By text: the loss of the original, the increase, and the divergence from the original, in nats per token."""
        found = {}
        for name, ids in self.windows.items():
            sums = torch.zeros(3, dtype=torch.float64)
            for window in ids.to(self.device):
                mine, theirs = (each(window[None]).logits[0, :-1].float() for each in (model, self.original))
                before = functional.cross_entropy(theirs, window[1:], reduction="sum")
                after = functional.cross_entropy(mine, window[1:], reduction="sum")
                apart = functional.kl_div(
                    mine.log_softmax(-1), theirs.log_softmax(-1), reduction="sum", log_target=True
                )
                sums += torch.stack([before, after - before, apart]).double().cpu()
            loss, rise, apart = (sums / (len(ids) * (WINDOW - 1))).tolist()
            found[name] = {"loss": round(loss, 4), "increase": round(rise, 4), "divergence": round(apart, 4)}
        return found


class Kept:
    """A model that computes each window once and keeps its logits (100 MB per window with a vocabulary of 49,152)."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.answers: dict[tuple[int, ...], Any] = {}

    def __call__(self, ids: torch.Tensor) -> Any:
        """The model's output."""
        key = tuple(ids.flatten().tolist())
        if key not in self.answers:
            self.answers[key] = SimpleNamespace(logits=self.model(ids).logits)
        return self.answers[key]


def windows(tokenizer: Any, text: Path, count: int, length: int) -> Tensor:
    """Windows `[count, length]` from the beginning of a text."""
    ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False).input_ids
    count = min(count, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)
