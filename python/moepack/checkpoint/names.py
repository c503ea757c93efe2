"""Maps the tensors of a checkpoint to parameters of transformers' model, using transformers' own loading rules.

The rules rename tensors and convert some: they stack, join, transpose or interleave the tensors of experts. moepack
therefore reads every checkpoint in the same way as transformers.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from moepack.checkpoint.classes import building, meta_model
from moepack.checkpoint.model import Part
from moepack.checkpoint.reader import Checkpoint
from moepack.errors import CheckpointError
from moepack.memory import without_collector

__all__ = ["Names", "Rules", "Source", "UnknownConversion", "check_tensors", "nearest"]

MISSING = "is missing from the checkpoint, although the model needs it"


class UnknownConversion(Exception):
    """Transformers builds a parameter by a conversion that moepack does not know."""


@dataclass(frozen=True)
class Source:
    """The tensors of a parameter before transformers' conversion.

    Attributes:
        pieces: places by piece and expert. The pieces are concatenated along the output rows.
        interleaved: True if the tensor interleaves the rows of two halves that the parameter concatenates, False for
            the opposite, None if both have the same order.
    """

    pieces: list[list[Part]]
    interleaved: bool | None = None


class Rules:
    """The rules by which transformers loads a model.

    Attributes:
        prefix: the base model's prefix. Checkpoint names may lack it, or have it if the model does not.
        parameters: shapes of the parameters and buffers in the state dict, by name.
        tied: tied parameters, mapped to their sources.
        converters: tensor conversions, by the name patterns that they match.
    """

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        rules = get_model_conversion_mapping(model)
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._state = model.state_dict()
        self._may_lack = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
        self.prefix: str = model.base_model_prefix
        self.parameters = {name: tuple(tensor.shape) for name, tensor in self._state.items()}
        self.tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
        self.converters = {pattern: rule for rule in self._converters for pattern in rule.source_patterns}

    @property
    def needed(self) -> list[str]:
        """The parameters that a checkpoint must have."""
        names = (name for name in self.parameters if name not in self.tied)
        return [name for name in names if not any(pattern.search(name) for pattern in self._may_lack)]

    def target(self, name: str, *, prefixed: bool = True) -> tuple[str, str | None]:
        """Return the parameter that a tensor is loaded into, and the pattern of its conversion or None.

        Args:
            name: name of a tensor in a checkpoint.
            prefixed: allow a missing or extra base model prefix, as transformers does.
        """
        from transformers.core_model_loading import rename_source_key

        places = (self.prefix, self._state) if prefixed else (None, None)
        target, pattern = rename_source_key(name, self._renamings, self._converters, *places)
        if target not in self._state and name in self._state:  # the renaming does not apply to it
            return name, None
        return target, pattern

    def targets(self, name: str) -> list[tuple[str, str | None]]:
        """Return all targets of a tensor, as `target` does, including conversions with several outputs."""
        target, pattern = self.target(name)
        others = self.converters[pattern].target_patterns if pattern is not None else [""]
        return [(target.replace(others[0], other, 1) if i else target, pattern) for i, other in enumerate(others)]


class Names:
    """The mapping between the tensors of a checkpoint and the parameters of a model.

    Attributes:
        plain: tensors that become a parameter without conversion, by parameter name.
        found: all tensors of a parameter, by parameter name and conversion pattern.
        tied: tied parameters, mapped to their sources.
        unread: tensors that become no parameter of the model, in the checkpoint's order.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any) -> None:
        rules = Rules(model)
        self._checkpoint = checkpoint
        self.tied, self._converters = rules.tied, rules.converters
        self.found: dict[str, dict[str | None, list[str]]] = {}
        self._number: dict[str, tuple[int, int]] = {}
        unread = []
        for name in checkpoint.names():
            targets = rules.targets(name)
            for number, (parameter, pattern) in enumerate(targets):
                self.found.setdefault(parameter, {}).setdefault(pattern, []).append(name)
                self._number[parameter] = number, len(targets)
            if not any(parameter in rules.parameters for parameter, _ in targets):
                unread.append(name)
        self.unread = tuple(unread)
        self.plain = {parameter: found[None][0] for parameter, found in self.found.items() if None in found}

    def converted(self, parameter: str, model: Any, device: torch.device | None = None) -> torch.Tensor | None:
        """Build a parameter that needs a conversion by transformers, on a device; None for any other parameter.

        The tensors are read and not kept.
        """
        found = {pattern: names for pattern, names in self.found.get(parameter, {}).items() if pattern is not None}
        if not found:
            return None
        rule = deepcopy(self._converters[next(iter(found))])
        number, _ = self._number[parameter]
        first = parameter.replace(rule.target_patterns[number], rule.target_patterns[0], 1) if number else parameter
        for pattern, names in found.items():
            for name in sorted(names, key=_natural):
                rule.add_tensor(first, name, pattern, partial(self._checkpoint.matrix, Part(name), device))
        made = rule.convert(first, model=model, config=model.config).get(parameter)
        tensor: torch.Tensor | None = made[0] if isinstance(made, list) else made
        return tensor

    def below(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield the parameters below a module with the names of their tensors."""
        for parameter, found in self.found.items():
            if parameter.startswith(f"{path}."):
                for names in found.values():
                    yield from ((parameter, name) for name in names)

    def source(self, parameter: str, shape: tuple[int, ...], experts: int) -> Source:
        """Return the tensors of a parameter that stacks experts.

        Raises:
            CheckpointError: the checkpoint lacks them.
            UnknownConversion: the parameter is tied, or transformers converts it in an unknown way.
        """
        if parameter in self.plain:
            return Source([_stacked(self.plain[parameter], shape, experts)])
        if parameter in self.tied:
            raise UnknownConversion(f"two of its modules share their experts ({parameter} is tied)")
        if parameter not in self.found:
            message = MISSING + nearest(parameter, self.unread)
            raise CheckpointError(message, file=self._checkpoint.path, tensor=parameter)
        found = self.found[parameter]
        rule = self._converters[next(pattern for pattern in found if pattern is not None)]
        source = Source([self._piece(parameter, pattern, found, experts) for pattern in rule.source_patterns])
        for operation in rule.operations:
            source = self._converted(source, operation, parameter, shape)
        return source

    def _piece(self, parameter: str, pattern: str, found: Mapping[str | None, list[str]], experts: int) -> list[Part]:
        """Return the places that a pattern matches: one tensor per expert, or one that stacks them."""
        if pattern not in found:
            message = f"the checkpoint has no tensor that matches '{pattern}', from which it is built"
            raise CheckpointError(message, file=self._checkpoint.path, tensor=parameter)
        names = sorted(found[pattern], key=_natural)
        if "*" not in pattern:
            return _stacked(names[0], (experts, 0, 0), experts)
        number, count = self._number[parameter]
        share = -(-len(names) // count)
        names = names[number * share : (number + 1) * share]
        if len(names) < experts:
            message = (
                f"config.json declares {experts} experts, but the checkpoint has {len(names)} tensors like '{pattern}'"
            )
            raise CheckpointError(message, file=self._checkpoint.path, tensor=parameter)
        return [Part(name) for name in names]

    def _converted(self, source: Source, operation: Any, parameter: str, shape: tuple[int, ...]) -> Source:
        """Apply one of transformers' operations to a source."""
        kind, axis = type(operation).__name__, getattr(operation, "dim", None)
        if (kind, axis) in (("MergeModulelist", 0), ("Concatenate", 1)) or kind.startswith("ErnieFuseAndSplit"):
            return source
        if kind == "Transpose" and {operation.dim0, operation.dim1} == {1, 2}:
            stored = self._checkpoint.info(source.pieces[0][0].tensor).shape
            if operation.check_dims and stored == shape:
                return source
            return Source([[replace(part, transposed=True) for part in piece] for piece in source.pieces])
        if (kind, axis) == ("Interleave", 1) and len(source.pieces) == 1:
            return replace(source, interleaved=not operation.inverse)
        raise UnknownConversion(f"transformers makes {parameter} by {kind}, which moepack does not support")


def _natural(name: str) -> list[Any]:
    """Return a sort key that orders experts by number."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _stacked(name: str, shape: tuple[int, ...], experts: int) -> list[Part]:
    """Return the experts of a stacked tensor: indices of its first axis, or equal slices of a matrix's rows."""
    if len(shape) == 3:
        return [Part(name, (expert,)) for expert in range(experts)]
    rows = shape[0] // experts
    return [Part(name, (slice(rows * expert, rows * (expert + 1)),)) for expert in range(experts)]


@without_collector()
def check_tensors(checkpoint: Checkpoint, packed: Iterable[str]) -> None:
    """Check that the checkpoint has every tensor that the model needs. No tensor is read.

    Args:
        checkpoint: the checkpoint.
        packed: paths of modules that have been described already, whose tensors are skipped.

    Raises:
        UnsupportedModelError: transformers cannot build a model from config.json.
        CheckpointError: a tensor is missing, or its shape differs from the model's.
    """
    with building(checkpoint.path):
        model = meta_model(checkpoint.path, checkpoint.config)
    names, described, rules = Names(checkpoint, model), tuple(f"{path}." for path in packed), Rules(model)
    for name in rules.needed:
        if name.startswith(described):
            continue
        if name not in names.found:
            message = MISSING + nearest(name, names.unread)
            raise CheckpointError(message, file=checkpoint.path, tensor=name)
        plain = names.found[name].get(None, [])
        if len(plain) > 1:
            message = f"is stored twice, as '{plain[0]}' and as '{plain[1]}'"
            raise CheckpointError(message, file=checkpoint.path, tensor=name)
        source = names.plain.get(name)
        if source is not None and checkpoint.info(source).shape != rules.parameters[name]:
            info = checkpoint.info(source)
            message = f"has shape {list(info.shape)}, but the model expects {list(rules.parameters[name])}"
            raise CheckpointError(message, file=info.file, tensor=source)


def nearest(name: str, unread: Iterable[str]) -> str:
    """Return the end of an error message that names a similar tensor, or an empty string.

    A similar name has additional components: an unmerged adapter stores `q_proj.weight` as `q_proj.base_layer.weight`.
    """
    parts = name.split(".")
    for other in unread:
        found = iter(other.split("."))
        if len(parts) > 1 and other.endswith(parts[-1]) and all(part in found for part in parts):
            adapted = any(f".{part}." in other for part in ("base_layer", "original_module", "modules_to_save"))
            advice = ": merge the adapter first (`merge_and_unload` of peft)" if adapted else ""
            return f"; the checkpoint has '{other}'{advice}"
    return ""
