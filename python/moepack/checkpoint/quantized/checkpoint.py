"""A checkpoint of quantized weights, seen as floating-point weights."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from moepack.checkpoint.decoded import DecodedCheckpoint
from moepack.checkpoint.quantized.scheme import Scheme
from moepack.checkpoint.reader import Checkpoint
from moepack.errors import CheckpointError
from moepack.format.header import TensorInfo
from moepack.format.regular import parse_json

__all__ = ["QuantizedCheckpoint"]

_ACTIVATIONS = (
    *(".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale"),
    *(".k_scale", ".v_scale", ".q_scale", ".prob_scale"),
)
"""Suffixes of tensors for the quantization of activations and of keys and values, which weights do not need."""

_SETTINGS = ("quantization_config", "compression_config")


class QuantizedCheckpoint(DecodedCheckpoint):
    """The weights of a quantized checkpoint.

    Attributes:
        method: its `quant_method`.
    """

    def __init__(self, original: Checkpoint, method: str, schemes: Sequence[Scheme]) -> None:
        """Decode `original`. A tensor of codes belongs to the first scheme that recognises it.

        Raises:
            CheckpointError: scales are missing, belong to no codes, or contradict the shape of the codes.
        """
        self._original, self.method = original, method
        self._weights: dict[str, tuple[str, Scheme]] = {}
        infos: dict[str, TensorInfo] = {}
        sources: dict[str, tuple[TensorInfo, ...]] = {}
        taken: set[str] = set()
        for scheme in schemes:
            for codes in original.names():
                if codes not in taken and scheme.holds(original, codes):
                    info, parts = self._describe(codes, scheme)
                    infos[info.name], sources[info.name] = info, parts
                    taken.update(part.name for part in parts)
        companions = tuple(end for scheme in schemes for end in scheme.companions)
        for name in original.names():
            if name not in taken and not name.endswith(_ACTIVATIONS):
                infos[name] = original.info(name)
            if name not in taken and name.endswith(companions):
                raise CheckpointError("belongs to no tensor of codes", file=original.info(name).file, tensor=name)
        config = {key: value for key, value in original.config.items() if key not in _SETTINGS}
        super().__init__(original, config, infos, sources, sources)
        self.notes = (*original.notes, self.note)

    def _describe(self, codes: str, scheme: Scheme) -> tuple[TensorInfo, tuple[TensorInfo, ...]]:
        """Record a quantized weight, and return its entry and those of its tensors."""
        stem, original = codes.removesuffix(scheme.codes), self._original
        parts = {scheme.codes: codes} | {end: stem + end for end in scheme.others if stem + end in original}
        for end in scheme.others:
            if end not in parts and end not in scheme.optional:
                message = f"has codes but no {stem}{end}"
                raise CheckpointError(message, file=original.info(codes).file, tensor=codes)
        infos = {end: original.info(name) for end, name in parts.items()}
        shapes = {end: info.shape for end, info in infos.items()}
        try:
            shape = scheme.shape(shapes)
            dtype = torch.float16 if infos[scheme.others[0]].dtype == torch.float16 else torch.bfloat16
            if scheme.state is not None and scheme.described is not None:
                shape, dtype = scheme.described(self._state(parts[scheme.state]), shapes)
        except (ValueError, IndexError) as cause:
            found = ", ".join(f"{info.name.rpartition('.')[2]} {list(info.shape)}" for info in infos.values())
            message = f"the shapes of codes and scales do not match: {found}"
            raise CheckpointError(message, file=infos[scheme.codes].file, tensor=codes) from cause
        name = stem + scheme.plain
        self._weights[name] = stem, scheme
        entry = TensorInfo(name, shape, dtype, infos[scheme.codes].file, 0, prod(shape) * dtype.itemsize)
        return entry, tuple(infos.values())

    def _state(self, name: str) -> dict[str, Any]:
        """Return the JSON object that a tensor holds."""
        file = self._original.info(name).file
        try:
            return parse_json(self._original.raw(name).tobytes(), file, CheckpointError)
        except CheckpointError as cause:
            raise CheckpointError(cause.detail, file=file, tensor=name) from cause

    def part(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of a stacked tensor, decoding only that matrix."""
        if name in self._weights and not self._weights[name][1].stacked:
            return self.tensor(name)[expert]
        return super().part(name, expert)

    def _decoded(self, name: str, expert: int | None) -> torch.Tensor:
        stem, scheme = self._weights[name]
        ends = [end for end in (scheme.codes, *scheme.others) if stem + end in self._original]
        tensors = {end: self._original.tensor(stem + end) for end in ends}
        if expert is not None:
            experts = len(tensors[scheme.codes])
            shared = {end for end, tensor in tensors.items() if tensor.ndim == 0 or len(tensor) != experts}
            tensors = {end: tensor if end in shared else tensor[expert] for end, tensor in tensors.items()}
        return scheme.values(tensors).to(self.info(name).dtype).contiguous()
