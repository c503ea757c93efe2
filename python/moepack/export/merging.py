"""Merges a saved peft adapter into decoded weights while they are exported (`export --adapter`).

peft loads the adapter onto a model whose weights take no memory, so only the adapter is in memory. A parameter is
merged when its decoded values arrive. Adapter layers of unknown kinds are rejected.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moepack.checkpoint.classes import meta_model
from moepack.checkpoint.experts import form_of
from moepack.checkpoint.names import Names
from moepack.errors import LoadError, UnsupportedModelError
from moepack.format.directory import PackedDirectory
from moepack.integrations.decoding import CHANNELS, RESIDUALS
from moepack.integrations.refusals import refuse_start, require_adapter
from moepack.modules.adapters import LowRank, by_projection

__all__ = ["Adapter"]

Change = Callable[[Tensor], Tensor]
"""Maps weights of the base model to merged weights, both float32."""


class Adapter:
    """The changes that a saved adapter makes to a model.

    Args:
        source: the packed model.
        directory: an adapter directory written by peft's `save_pretrained`.

    Raises:
        LoadError: peft is not installed, or cannot load the adapter onto this model.
        UnsupportedModelError: the adapter is not LoRA, or has a layer that cannot be merged.
    """

    def __init__(self, source: PackedDirectory, directory: Path) -> None:
        self._path, self._packed = directory, source.manifest.packed()
        self._changes: dict[str, Change] = {}
        self._experts: dict[tuple[str, str], LowRank] = {}
        model = _with_adapter(source, directory)
        base = model.get_base_model()
        self._names = Names(_DenseNames(source), meta_model(source.path, source.config))  # type: ignore[arg-type]
        for path, module in base.named_modules():
            self._read(base, path.replace(".base_layer", ""), module)
        for name, parameter in base.named_parameters():
            if parameter.ndim == 1 and not parameter.isnan().all() and not _is_adapters(name):
                self._changes[name.replace(".base_layer", "")] = _replaced(parameter.detach())
        self._refuse_tied()

    def merged(self, parameter: str, values: Tensor) -> Tensor:
        """Return the merged values of a parameter, in the dtype of `values`.

        Args:
            parameter: path of the parameter in transformers' model.
            values: values of the base model.
        """
        change = self._changes.pop(parameter, None)
        return values if change is None else change(values.float()).to(values.dtype)

    def merged_experts(self, module: str, projection: str, values: Tensor) -> Tensor:
        """Return the merged values of an experts projection, shape (E, R, C)."""
        factors = self._experts.pop((module, projection), None)
        return values if factors is None else torch.baddbmm(values.float(), factors.up, factors.down).to(values.dtype)

    def dense(self) -> Mapping[str, str]:
        """Return the changed parameters that are stored unpacked, by tensor name."""
        plain = self._names.plain
        return {plain[parameter]: parameter for parameter in self._changes if parameter in plain}

    def finish(self) -> None:
        """Check that all changes have been merged.

        Raises:
            UnsupportedModelError: the directory has no tensor for a changed parameter.
        """
        left = [*self._changes, *(f"{module}.{projection}" for module, projection in self._experts)]
        if left:
            message = f"the adapter changes {left[0]}, which is not a separate tensor of the packed directory"
            raise UnsupportedModelError(message, file=self._path)

    def _read(self, base: Any, path: str, module: Any) -> None:
        """Record the changes of a peft layer."""
        from peft.tuners import lora
        from peft.tuners.lora.layer import ParamWrapper
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper

        if isinstance(module, ModulesToSaveWrapper):
            (trained,) = module.modules_to_save.values()
            self._changes |= {f"{path}.{name}": _replaced(value.detach()) for name, value in trained.named_parameters()}
        elif isinstance(module, ParamWrapper):
            self._read_parameter(path, module)
        elif type(module) is lora.Linear and not {*module.lora_variant} - _with_magnitude(module):
            self._changes[f"{path}.weight"] = _linear(module)
            for adapter in module.lora_B:
                if (bias := module.lora_B[adapter].bias) is not None:
                    self._changes[f"{path}.bias"] = _added(bias.detach() * module.scaling[adapter])
        elif type(module) is lora.Embedding and not module.lora_variant:
            for adapter in module.lora_embedding_A:
                self._changes[f"{path}.weight"] = _added(module.get_delta_weight(adapter).detach())
        elif isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            message = f"the adapter has a layer that cannot be merged, {type(module).__name__} at '{path}'"
            raise UnsupportedModelError(message, file=self._path)

    def _read_parameter(self, path: str, module: Any) -> None:
        """Record the changes of a parameter's factors: a router's or the experts'."""
        name = module.parameter_name
        form = form_of(module.get_base_layer())
        for adapter in module.lora_A:
            if form is not None and name in form.parameters:
                self._refuse_reordered(path)
                factors = by_projection(form, name, *_detached(module.get_delta_factors(adapter)))
                self._experts.update({(path, projection): each for projection, each in factors.items()})
            elif module.get_param().ndim == 2:
                self._changes[f"{path}.{name}"] = _added(_product(module, adapter))
            else:
                message = f"the adapter changes {path}.{name}, which does not hold experts of a known form"
                raise UnsupportedModelError(message, file=self._path)

    def _refuse_reordered(self, module: str) -> None:
        """Check that the channels of experts are in the order of the model to which the adapter belongs."""
        records = self._packed.values()
        if any(record.module == module and record.projection in (CHANNELS, RESIDUALS) for record in records):
            message = f"the adapter changes {module}, whose channels are packed in another order"
            raise UnsupportedModelError(message, file=self._path)

    def _refuse_tied(self) -> None:
        tied = self._names.tied
        for parameter in self._changes:
            if parameter in tied or parameter in tied.values():
                message = f"the adapter changes {parameter}, which is tied to another parameter: only one would change"
                raise UnsupportedModelError(message, file=self._path)


class _DenseNames:
    """The names of the unpacked tensors, with the interface of a checkpoint."""

    def __init__(self, source: PackedDirectory) -> None:
        self._names = [name for name, record in source.manifest.tensors.items() if not record.packed]

    def names(self) -> list[str]:
        """Return all names."""
        return self._names


def _with_adapter(source: PackedDirectory, directory: Path) -> Any:
    """Load the adapter onto the model without weights."""
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise LoadError(f"peft is needed to read an adapter (pip install 'moepack[train]'): {error}") from error
    require_adapter(directory)
    try:
        config = PeftConfig.from_pretrained(str(directory))
        method = str(getattr(config.peft_type, "value", config.peft_type))
        if method != "LORA":
            raise UnsupportedModelError(f"only LoRA adapters can be merged, but this one is {method}", file=directory)
        refuse_start(config, directory)
        model = meta_model(source.path, source.config)
        _without_memory(model)
        model = get_peft_model(model, config)
        result = model.load_adapter(str(directory), "default", torch_device="cpu")
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise LoadError(f"peft cannot load the adapter onto this model: {reason}", file=directory) from error
    for what, names in (("lacks", result.missing_keys), ("has the unknown tensor", result.unexpected_keys)):
        if names:
            raise LoadError(f"the adapter belongs to another model: it {what} {names[0]}", file=directory)
    return model


def _without_memory(model: Any) -> None:
    """Move a meta model to the CPU, where peft puts its adapters, with matrices that hold one number each.

    Vectors are filled with NaN, so that those trained by the adapter, such as biases, can be recognized afterwards.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            matrix = parameter.ndim > 1
            values = torch.zeros(1).expand(parameter.shape) if matrix else torch.full(parameter.shape, torch.nan)
            setattr(module, name, nn.Parameter(values, requires_grad=False))


def _is_adapters(name: str) -> bool:
    """Return whether a parameter belongs to an adapter and not to the model."""
    return ".lora_" in name or ".modules_to_save." in name


def _with_magnitude(module: Any) -> set[str]:
    """Return the names of a layer's DoRA adapters."""
    return {*module.lora_magnitude_vector}


def _product(module: Any, adapter: str) -> Tensor:
    """Return the matrix that an adapter adds, shape (R, C)."""
    up, down = module.lora_B[adapter].weight.detach(), module.lora_A[adapter].weight.detach()
    product: Tensor = up.float() @ down.float() * module.scaling[adapter]
    return product


def _linear(module: Any) -> Change:
    """Return the change of a linear layer's adapter. DoRA scales rows to their magnitudes (arXiv 2402.09353)."""
    (adapter,) = module.lora_A
    product = _product(module, adapter)
    if adapter not in module.lora_magnitude_vector:
        return _added(product)
    magnitude = module.lora_magnitude_vector[adapter].weight.detach().float()

    def change(values: Tensor) -> Tensor:
        sums = values + product
        scaled: Tensor = sums * (magnitude / sums.norm(dim=1)).unsqueeze(1)
        return scaled

    return change


def _added(product: Tensor) -> Change:
    return lambda values: values + product


def _replaced(value: Tensor) -> Change:
    return lambda _: value.float()


def _detached(factors: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor, float]:
    left, right, scaling = factors
    return left.detach(), right.detach(), scaling
