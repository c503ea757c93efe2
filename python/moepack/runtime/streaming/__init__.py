"""Streaming experts from disk: a model runs within a given number of bytes.

`stream` installs a store that keeps in memory what every token needs. It reads everything else on demand, bypassing the
page cache, into memory that it accounts for: whole experts (`StreamingStore`), or single channels if experts are stored
by channel (`ChannelStore`). `Region` is the address range of a tensor, and `Source` reads a file. `Residency` decides
which experts stay in memory, and `RecordCache` which channels. `foresee` predicts what a layer needs from the inputs of
the previous one.
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
    """Keep the weights of a mapped packed model within a number of bytes.

    Args:
        model: a model on the CPU from `moepack.load`.
        memory: the most bytes for weights.

    Raises:
        CorruptionError, LoadError: as in `StreamingStore.take`.
    """
    by_channels = ChannelStore.suits(model, memory)
    (ChannelStore if by_channels else StreamingStore)(memory).take(model)


def foresee(model: Any, directory: Path, approximate: bool = False) -> None:
    """Predict what each expert layer needs from the inputs of the previous one (`moepack.runtime.prediction`).

    Args:
        model: a packed model.
        directory: its packed directory, which may contain predictors; otherwise routers are used.
        approximate: use the prediction to select channels, if experts are stored by channel.

    Raises:
        CorruptionError: the predictors are damaged, or belong to another model.
        LoadError: `approximate` is set, but experts are not stored by channel.
    """
    known, layers = predictors_of(directory), expert_layers(model)
    if approximate and not any(isinstance(layer, SparseExperts) for layer in layers):
        raise LoadError("approximate requires experts that are stored by channel", file=directory)
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
            raise CorruptionError("belongs to another model", file=directory / PREDICTORS, tensor=names[id(layer)])
        foresight = Foresight(predictor, min(top_k, experts), approximate)
        before.register_forward_pre_hook(foresight.note)
        if isinstance(layer, SparseExperts):
            layer.foresight = foresight
        if isinstance(before.store, StreamingStore):
            before.store.foresee(before, layer, foresight)
