"""Installs predictions in a model: each expert layer is predicted from the inputs of the previous one."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from moepack.checkpoint.architectures import described
from moepack.errors import CorruptionError, LoadError
from moepack.format.hub import PREDICTORS
from moepack.modules.experts import SparseExperts
from moepack.stores.streaming import StreamingStore
from moepack.stores.streaming.experts import expert_layers
from moepack.stores.streaming.prediction import Foresight, Predictor, predictors_of, router_of

__all__ = ["foresee"]


def foresee(model: Any, directory: Path, approximate: bool = False) -> None:
    """Predict what each expert layer needs from the inputs of the previous one (`moepack.stores.streaming.prediction`).

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
