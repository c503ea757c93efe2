"""Predicts what an expert layer will need from the inputs of the previous expert layer (FloE, section 3.3).

The residual stream changes slowly, so the inputs of consecutive layers are similar. The next layer's router, or a map
fitted to its choices during packing, predicts which experts it will choose (inter-expert). Its deciding projections
predict which of their channels (intra-expert). Fitted maps are stored in a file of the packed directory. Without that
file, routers are used directly.

Invariant: a prediction only determines what is read ahead, unless `approximate` is set. Then it also selects the
channels; experts and all values still come from the layer's own inputs.
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
"""The most tokens in a call with prediction: more tokens need nearly everything."""

_PARTS = ("direct", "inner", "outer")


@dataclass(frozen=True)
class Predictor:
    """A map to the logits of the next layer's experts: direct x + outer relu(inner x).

    Attributes:
        direct: [E, H] float32.
        inner: [N, H]; None for a linear map.
        outer: [E, N]; None for a linear map.
    """

    direct: Tensor
    inner: Tensor | None = None
    outer: Tensor | None = None

    def logits(self, x: Tensor) -> Tensor:
        """The logits [T, E] for the inputs of the previous layer, [T, H]."""
        found = x.float() @ self.direct.T
        if self.inner is not None and self.outer is not None:
            found = found + torch.relu(x.float() @ self.inner.T) @ self.outer.T
        return found


def serialized(predictors: Mapping[str, Predictor]) -> bytes:
    """Serialize predictors, keyed by the predicted layer, as bfloat16 safetensors `LAYER.direct` and so on."""
    parts = {(layer, part): getattr(found, part) for layer, found in predictors.items() for part in _PARTS}
    tensors = {f"{layer}.{part}": tensor.bfloat16() for (layer, part), tensor in parts.items() if tensor is not None}
    data: bytes = save(tensors, {"format": "pt"})
    return data


def predictors_of(directory: Path) -> dict[str, Predictor]:
    """Read the predictors of a packed directory, by layer; empty if it has no such file.

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
        raise CorruptionError(f"is not a file of predictors: {error}", file=file) from error
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        found.setdefault(layer, {})[part] = tensor
    for layer, parts in found.items():
        if not _fit(parts):
            raise CorruptionError("is not a valid predictor", file=file, tensor=layer)
    return {layer: Predictor(**parts) for layer, parts in found.items()}


def _fit(parts: Mapping[str, Tensor]) -> bool:
    """Whether tensors form one predictor."""
    if set(parts) not in ({"direct"}, set(_PARTS)) or any(part.ndim != 2 for part in parts.values()):
        return False
    experts, columns = parts["direct"].shape
    inner = len(parts["inner"]) if "inner" in parts else 0
    return "inner" not in parts or (parts["inner"].shape, parts["outer"].shape) == ((inner, columns), (experts, inner))


def router_of(model: Any, layer: Any, experts: int, columns: int) -> Tensor | None:
    """Return the weights [E, H] of the router next to an experts module; None if no sibling has this shape."""
    path = next(name for name, module in model.named_modules() if module is layer)
    for child in model.get_submodule(path.rpartition(".")[0]).children():
        weight: Tensor | None = child._parameters.get("weight")
        if weight is not None and weight.shape == (experts, columns):
            return weight.detach()
    return None


@dataclass
class Foresight:
    """Predicts a layer's call from the inputs of the previous expert layer, separately in each thread.

    Attributes:
        predictor: predicts the experts.
        top_k: experts per token.
        approximate: whether the prediction selects the channels.
    """

    predictor: Predictor
    top_k: int
    approximate: bool = False
    _seen: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def note(self, module: Any, given: tuple[Tensor, ...]) -> None:
        """Record the inputs of the previous layer; used as its forward pre-hook."""
        self._seen[get_ident()] = given[0].detach().reshape(-1, given[0].shape[-1])

    def seen(self) -> Tensor | None:
        """The inputs of the previous layer in this thread, [T, H]."""
        return self._seen.get(get_ident())

    def deciding(self, count: int) -> Tensor | None:
        """Inputs that select the channels for `count` tokens; None if the tokens' own inputs do."""
        found = self.seen() if self.approximate else None
        return found if found is not None and len(found) == count else None

    def choice(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The previous layer's inputs [T, H], and the experts predicted for them with their weights, [T, k].

        None without inputs or with too many tokens.
        """
        x = self.seen()
        if x is None or not 0 < len(x) <= TOKENS:
            return None
        shares, index = self.predictor.logits(x).softmax(-1).topk(self.top_k)
        return x, index, shares / shares.sum(-1, keepdim=True)
