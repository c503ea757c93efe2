"""Converts a packed model back into an ordinary one with decoded weights (`model.dequantize()`)."""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack.checkpoint.names import Rules
from moepack.errors import LoadError, UnsupportedModelError
from moepack.format.balance import SAME, Balance, balance_of
from moepack.format.directory import read_manifest
from moepack.format.manifest import RESIDUALS
from moepack.stores.module import PackedModule

__all__ = [
    "CHANNELS",
    "RESIDUALS",
    "decode_model",
    "keep_scales",
    "plain_model",
    "projection_values",
    "unpacked_scales",
]

CHANNELS = "channels"
"""The projection that stores gate and down by channels: gate rows beside down columns."""


def decode_model(model: Any, dtype: torch.dtype) -> None:
    """Replace the packed modules of a model by transformers' own modules with decoded weights.

    Decoded weights require gradients if any parameter of the model does. All weights are in the scales of the model's
    source, so that adapters of the source fit.

    Args:
        model: a model loaded by moepack.
        dtype: dtype of the decoded weights. The whole model is cast if its dtype differs.

    Raises:
        UnsupportedModelError: adapters wrap packed modules, or the model is split between a GPU and the CPU.
        LoadError, CorruptionError: the packed bytes are no longer in memory and their files cannot be read.
    """
    packed = {path: module for path, module in model.named_modules() if isinstance(module, PackedModule)}
    if adapted := next((path for path in packed if path.rpartition(".")[2] == "base_layer"), None):
        message = "an adapter wraps it; unload the adapter before dequantizing the model"
        raise UnsupportedModelError(message, tensor=adapted.removesuffix(".base_layer"))
    if divided := next((path for path, module in packed.items() if module.home is not None), None):
        message = "it runs on the CPU in a model on a GPU; load the model on one device to dequantize it"
        raise UnsupportedModelError(message, tensor=divided)
    plain, cast = plain_model(model), dtype != model.dtype
    _restore_others(model, plain)
    trained = any(parameter.requires_grad for parameter in model.parameters())
    tied = dict(getattr(plain, "all_tied_weights_keys", None) or {})
    for path, module in packed.items():
        if f"{path}.weight" not in tied:
            device = model.device if module.packed_bytes() is None else module.qweight.device
            filled = _filled(plain.get_submodule(path), module, dtype, trained)
            model.set_submodule(path, filled.to(device))
    for target, source in tied.items():
        path = target.rpartition(".")[0]
        if path in packed:
            head: Any = plain.get_submodule(path)
            head.weight = model.get_parameter(source)
            _take_others(head, packed[path])
            model.set_submodule(path, head)
            model.all_tied_weights_keys[target] = source
    if cast:
        model.to(dtype)
    for module in (model, *model.modules()):
        for name in ("forward", "save_pretrained"):  # instance attributes that loading set over the class's methods
            if type(vars(module).get(name)).__module__.startswith("moepack."):
                delattr(module, name)


def projection_values(read: Callable[[str], Tensor], packed: Mapping[str, Any], projection: str) -> Tensor:
    """Return the decoded weights of an experts projection, shape (E, R, C).

    Args:
        read: returns the decoded values of a stored projection.
        packed: the stored projections. Gate and down may be stored as channel records.
        projection: the projection to return: gate_proj, up_proj or down_proj.
    """
    records = next((name for name in (CHANNELS, RESIDUALS) if name in packed), None)
    if records is None or projection == "up_proj":
        return read(projection)
    gate, down = read(records).chunk(2, dim=2)
    half = gate if projection == "gate_proj" else down.transpose(1, 2)
    return half + read(projection) if records == RESIDUALS else half


def plain_model(model: Any) -> Any:
    """Build the model with transformers' own modules on the meta device."""
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        return type(model)(config)


def keep_scales(model: Any, directory: Path, packed: Iterable[PackedModule]) -> None:
    """Keep the factors of a packed directory with its model, so that copies do not need the directory.

    Models of the hub are loaded without the file of factors; an error is raised when the factors are needed.

    Raises:
        CorruptionError: the factors are damaged.
    """
    try:
        balance = balance_of(directory)
    except LoadError:
        vars(model)[_UNPACKED] = directory
        return
    if not balance:
        return
    for module in packed:
        module.keep_scales()
    vars(model)[_UNPACKED] = _unpacked(directory, balance)


_UNPACKED = "_moepack_balance"
"""Attribute of a model: the factors of its unpacked tensors, or the directory in which their file is missing."""


def _unpacked(directory: Path, balance: Balance) -> Balance:
    records = read_manifest(directory).tensors
    return balance.only(name for name, record in records.items() if not record.packed)


def unpacked_scales(model: Any, plain: Any = None) -> dict[str, tuple[str, Balance]]:
    """Return the parameters of a model that are stored unpacked in other scales than the source's.

    Args:
        model: a model loaded by moepack.
        plain: the model with transformers' own modules; None builds it if there are factors.

    Returns:
        The key of each parameter in the factors, and the factors.

    Raises:
        LoadError: the file of factors is missing.
    """
    balance = vars(model).get(_UNPACKED, SAME)
    if isinstance(balance, Path):
        balance = _unpacked(balance, balance_of(balance))
    if not balance:
        return {}
    rules = Rules(plain_model(model) if plain is None else plain)
    return {target: (key, balance) for key in balance.keys for target, rule in [rules.target(key)] if rule is None}


def _restore_others(model: Any, plain: Any) -> None:
    """Return the parameters that are not packed (norms, routers, biases) to the scales of the model's source."""
    for name, (key, balance) in unpacked_scales(model, plain).items():
        with torch.no_grad(), suppress(AttributeError):
            parameter = model.get_parameter(name)
            parameter.copy_(balance.restored(key, parameter))
    vars(model).pop(_UNPACKED, None)


def _filled(original: Any, module: PackedModule, dtype: torch.dtype, trained: bool) -> nn.Module:
    """Fill a meta module with the decoded weights of its packed counterpart."""
    read = module.values
    if module.form is not None:
        for parameter, shape in module.stock.items():
            projections = [name for name, place in module.form.places.items() if place.parameter == parameter]
            decoded = {name: projection_values(read, module.shapes, name) for name in projections}
            values = {name: module.restored(name, each).to(dtype) for name, each in decoded.items()}
            _set(original, parameter, module.form.joined(values, shape), trained)
    elif isinstance(original, nn.ModuleDict):
        for projection in module.projections:
            for expert, matrix in zip(original.values(), module.restored(projection, read(projection)), strict=True):
                _set(expert, f"{projection}.weight", matrix.to(dtype), trained)
    else:
        _set(original, "weight", module.restored("packed", read("packed"))[0].to(dtype), trained)
    _take_others(original, module)
    filled: nn.Module = original.train(module.training)
    return filled


def _set(module: nn.Module, name: str, value: Tensor, trained: bool) -> None:
    """Set a parameter by its dotted name."""
    owner, _, last = name.rpartition(".")
    module.get_submodule(owner).register_parameter(last, nn.Parameter(value, requires_grad=trained))


def _take_others(original: Any, module: Any) -> None:
    """Copy the parameters and children that are not packed: biases and a norm."""
    for name, parameter in module.named_parameters(recurse=False):
        original.register_parameter(name, parameter)
    for name, child in module.named_children():
        original.add_module(name, child)
