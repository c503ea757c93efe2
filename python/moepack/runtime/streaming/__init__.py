"""Experts that stay on disk: a model runs in a number of bytes that the user names.

`stream` lets a model's store keep what every token needs in memory and read the rest as routers ask for it, past the
system's page cache and into memory that it counts: whole experts (`StreamingStore`), or single channels where experts
are kept so (`ChannelStore`). `Region` is the address range of a tensor, `Source` reads a file, `Residency` decides
which experts stay and `RecordCache` which channels. `foresee` lets what enters a layer tell what the next one wants.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

from moepack.checkpoint.architectures import described
from moepack.errors import CorruptionError, LoadError
from moepack.format.hub import PREDICTORS
from moepack.runtime.experts import SparseExperts
from moepack.runtime.prediction import Foresight, Predictor, predictors_of, router_of
from moepack.runtime.streaming.channels import ChannelStore
from moepack.runtime.streaming.residency import Statistics
from moepack.runtime.streaming.store import StreamingStore, expert_layers, statistics_of

__all__ = ["ChannelStore", "Statistics", "StreamingStore", "foresee", "statistics_of", "stream"]


def stream(model: Any, memory: int) -> None:
    """Keep the weights of a packed model whose bytes are mapped within a number of bytes.

    Args:
        model: as `moepack.load` gives it, on the CPU.
        memory: the most bytes that weights may take.

    Raises:
        CorruptionError, LoadError: as `StreamingStore.take`.
    """
    by_channels = ChannelStore.suits(model, memory)
    (ChannelStore if by_channels else StreamingStore)(memory).take(model)


def foresee(model: Any, directory: Path, approximate: bool = False) -> None:
    """Let what enters each layer of experts tell what the next one is likely to want (`moepack.runtime.prediction`).

    Args:
        model: a packed model.
        directory: where it was loaded from, which may hold predictors; routers serve elsewhere.
        approximate: let the guess decide over channels, where experts are kept so.

    Raises:
        CorruptionError: the predictors are damaged, or of another model.
        LoadError: `approximate`, and the experts are not kept by channels.
    """
    known, layers = predictors_of(directory), expert_layers(model)
    if approximate and not any(isinstance(layer, SparseExperts) for layer in layers):
        raise LoadError("nothing can be approximated: the experts are not kept by channels", file=directory)
    names = {id(module): name for name, module in model.named_modules()}
    top_k = described(model.config.model_type).top_k(vars(model.config))
    for before, layer in pairwise(layers):
        experts, _, columns = layer.shapes[layer.projections[0]]
        predictor = known.get(names[id(layer)])
        if predictor is None and (router := router_of(model, layer, experts, columns)) is not None:
            predictor = Predictor(router.float())
        if predictor is None or before.shapes[before.projections[0]][2] != columns:
            continue
        if predictor.direct.shape != (experts, columns):
            raise CorruptionError("is of another model", file=directory / PREDICTORS, tensor=names[id(layer)])
        foresight = Foresight(predictor, min(top_k, experts), approximate)
        before.register_forward_pre_hook(foresight.note)
        if isinstance(layer, SparseExperts):
            layer.foresight = foresight
        if isinstance(before.store, StreamingStore):
            before.store.foresee(before, layer, foresight)
