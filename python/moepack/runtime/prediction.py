"""What a layer of experts will want, guessed from what enters the experts of the layer before (FloE, section 3.3).

Residual streams change slowly: what enters one layer is much like what enters the next. So the next layer's router,
or a map that was fitted to its choices when the model was packed, tells which experts it will choose (inter-expert),
and its deciding projections which of their channels (intra-expert). Fitted maps lie in a file of the packed directory;
where it has none, routers are used as they are.

Invariant: a guess decides what is read ahead, and nothing else, unless `approximate` says otherwise: then channels are
chosen by it, and experts and all values still by the layer's own inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from moepack.errors import CorruptionError
from moepack.format.header import read_header
from moepack.format.hub import PREDICTORS

__all__ = ["Foresight", "Predictor", "predictors_of", "router_of", "serialized"]

TOKENS = 8
"""The most tokens of a call for which is guessed: of more, nearly everything is wanted."""

_PARTS = ("direct", "inner", "outer")


@dataclass(frozen=True)
class Predictor:
    """A map to the logits of the next layer's experts: direct x + outer relu(inner x).

    Attributes:
        direct: [E, H] float32.
        inner: [N, H]; None of a linear map.
        outer: [E, N]; None of a linear map.
    """

    direct: Tensor
    inner: Tensor | None = None
    outer: Tensor | None = None

    def logits(self, x: Tensor) -> Tensor:
        """The logits [T, E] for what entered the layer before, [T, H]."""
        found = x.float() @ self.direct.T
        if self.inner is not None and self.outer is not None:
            found = found + torch.relu(x.float() @ self.inner.T) @ self.outer.T
        return found


def serialized(predictors: Mapping[str, Predictor]) -> bytes:
    """The file of predictors by the layer that they guess, as bfloat16 safetensors `LAYER.direct` and so on."""
    parts = {(layer, part): getattr(found, part) for layer, found in predictors.items() for part in _PARTS}
    tensors = {f"{layer}.{part}": tensor.bfloat16() for (layer, part), tensor in parts.items() if tensor is not None}
    data: bytes = save(tensors, {"format": "pt"})
    return data


def predictors_of(directory: Path) -> dict[str, Predictor]:
    """Read the predictors of a packed directory, by layer; none where it has no such file.

    Raises:
        CorruptionError: the file is damaged.
    """
    file = directory / PREDICTORS
    if not file.is_file():
        return {}
    read_header(file, CorruptionError)
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CorruptionError(f"holds no predictors: {error}", file=file) from error
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        found.setdefault(layer, {})[part] = tensor
    for layer, parts in found.items():
        if not _fit(parts):
            raise CorruptionError("is no predictor", file=file, tensor=layer)
    return {layer: Predictor(**parts) for layer, parts in found.items()}


def _fit(parts: Mapping[str, Tensor]) -> bool:
    """Whether tensors are the parts of one predictor."""
    if set(parts) not in ({"direct"}, set(_PARTS)) or any(part.ndim != 2 for part in parts.values()):
        return False
    experts, columns = parts["direct"].shape
    inner = len(parts["inner"]) if "inner" in parts else 0
    return "inner" not in parts or (parts["inner"].shape, parts["outer"].shape) == ((inner, columns), (experts, inner))


def router_of(model: Any, layer: Any, experts: int, columns: int) -> Tensor | None:
    """The weights [E, H] of the router beside a layer of experts; None where there is nothing that looks like one."""
    path = next(name for name, module in model.named_modules() if module is layer)
    for child in model.get_submodule(path.rpartition(".")[0]).children():
        weight: Tensor | None = child._parameters.get("weight")
        if weight is not None and weight.shape == (experts, columns):
            return weight.detach()
    return None


@dataclass
class Foresight:
    """What is known of a layer's call from what entered the experts of the layer before, in each thread.

    Attributes:
        predictor: guesses the experts.
        top_k: how many are chosen for a token.
        approximate: whether the guess decides over channels.
    """

    predictor: Predictor
    top_k: int
    approximate: bool = False
    _seen: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def note(self, module: Any, given: tuple[Tensor, ...]) -> None:
        """See what enters the layer before: its forward pre-hook."""
        self._seen[get_ident()] = given[0].detach().reshape(-1, given[0].shape[-1])

    def seen(self) -> Tensor | None:
        """What entered the layer before in this thread, [T, H]."""
        return self._seen.get(get_ident())

    def deciding(self, count: int) -> Tensor | None:
        """What decides over the channels of so many tokens in place of their own inputs; None: those do."""
        found = self.seen() if self.approximate else None
        return found if found is not None and len(found) == count else None

    def choice(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """What entered before, [T, H], the experts that the layer will choose for it and their weights, [T, k].

        None where nothing is known, or too many tokens are asked for.
        """
        x = self.seen()
        if x is None or not 0 < len(x) <= TOKENS:
            return None
        shares, index = self.predictor.logits(x).softmax(-1).topk(self.top_k)
        return x, index, shares / shares.sum(-1, keepdim=True)
