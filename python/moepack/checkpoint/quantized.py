"""Decodes quantized source checkpoints into floating-point weights.

A quantized weight consists of several tensors: codes, scales, maybe zero points. Here they appear as one tensor under
its unquantized name, decoded when it is read, one tensor or one expert of a stacked tensor at a time. Values are
rounded to bfloat16 (float16 if the scales are float16), as in transformers' dequantization. Unquantized tensors are
passed through unchanged.

| `quant_method` | tensors of a weight | source |
|---|---|---|
| `fp8`, `fbgemm_fp8`, `modelopt` and `quark` in fp8 | `weight` (float8_e4m3fn), `weight_scale_inv` or `weight_scale`: a
scale per block, row, expert or tensor; also for stacked experts (`gate_up_proj`, `gate_up_proj_scale`) |
DeepSeek-V3, section 3.3; the libraries |
| `mxfp4` | `_blocks`, `_scales`: groups of 32 values of 4 bits, exponents of two | OCP Microscaling Formats 1.0 |
| `compressed-tensors` | `weight_packed`, `weight_scale`, maybe `weight_zero_point`, `weight_g_idx` (4 or 8 bits); or
`weight` (float8_e4m3fn), `weight_scale`: a scale per row, block or tensor | its library |
| `gptq`, `awq` | `qweight`, `qzeros`, `scales`, and `g_idx` of gptq (4 bits) | arXiv 2210.17323, 2306.00978 |
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moepack.checkpoint.dense import FLOATS
from moepack.checkpoint.headed import headed
from moepack.checkpoint.reader import Checkpoint
from moepack.checkpoint.tied import untied
from moepack.checkpoint.wrappers import unwrapped
from moepack.errors import CheckpointError, UnsupportedModelError
from moepack.format.header import TensorInfo

__all__ = ["QuantizedCheckpoint", "adapted", "open_checkpoint"]

Tensors = Mapping[str, torch.Tensor]

_ACTIVATIONS = (".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale")
"""Suffixes of tensors for activation quantization, which weights do not need."""


@dataclass(frozen=True)
class _Kind:
    """A quantization scheme.

    Attributes:
        codes: suffix of the tensor of codes.
        others: suffixes of its companions, in place of `codes`.
        plain: suffix of the weight's name, in place of `codes`.
        shape: computes the weight's shape from the shapes of its tensors by suffix. Raises ValueError if they are
            inconsistent.
        values: computes the weight in float32 from its tensors by suffix.
        stacked: whether a tensor may hold all experts.
        optional: suffixes of companions that may be missing.
        dtype: dtype of the codes, if their name does not distinguish them from other tensors.
    """

    codes: str
    others: tuple[str, ...]
    plain: str
    shape: Callable[[Mapping[str, tuple[int, ...]]], tuple[int, ...]]
    values: Callable[[Tensors], torch.Tensor]
    stacked: bool = False
    optional: tuple[str, ...] = ()
    dtype: torch.dtype | None = None

    @property
    def companions(self) -> tuple[str, ...]:
        """Suffixes that only companions of codes have."""
        return self.others if self.codes else tuple(f"weight{end}" for end in self.others)


def open_checkpoint(path: str | PathLike[str]) -> Checkpoint:
    """Open a checkpoint, quantized or not. Arguments and errors as for `Checkpoint.open`.

    Raises:
        UnsupportedModelError: the quantization is not supported; the message names it.
        CheckpointError: scales are missing, or their shape does not match the codes.
    """
    return adapted(Checkpoint.open(path))


def adapted(checkpoint: Checkpoint) -> Checkpoint:
    """Return the form of a checkpoint that the pipeline reads: plain names, ties and classes, decoded weights.

    Raises:
        UnsupportedModelError, CheckpointError: as for `open_checkpoint`.
    """
    checkpoint = untied(unwrapped(headed(checkpoint)))
    settings = checkpoint.config.get("quantization_config") or checkpoint.config.get("compression_config")
    if not isinstance(settings, dict) or settings.get("quant_method") in (None, "moepack"):
        return checkpoint
    return QuantizedCheckpoint(checkpoint, str(settings["quant_method"]), _kind(checkpoint, settings))


def _kind(checkpoint: Checkpoint, settings: Mapping[str, Any]) -> _Kind:
    """Return the quantization scheme of a checkpoint, from its settings and tensor names."""
    method, file = settings["quant_method"], checkpoint.path / "config.json"
    plain = "start from the f32, f16 or bf16 weights"
    known = _KINDS.get(method.lower()) if isinstance(method, str) else None
    if known is None:
        message = f"already quantized by {method!r}; moepack decodes {', '.join(_KINDS)}: {plain}"
        raise UnsupportedModelError(message, file=file)
    try:
        kind = known(settings, checkpoint.names())
    except (KeyError, TypeError, ValueError) as cause:
        detail = f"no setting {cause}" if isinstance(cause, KeyError) else str(cause)
        message = f"already quantized by '{method}' with settings that moepack does not support ({detail}); {plain}"
        raise UnsupportedModelError(message, file=file) from cause
    if not any(_is_codes(checkpoint, name, kind) for name in checkpoint.names()):
        sought = f"called *{kind.codes}" if kind.dtype is None else f"in {_short(kind.dtype)}"
        found = next(filter(lambda name: _may_be_codes(checkpoint, name), checkpoint.names()), None)
        advice = "if they are not, remove quantization_config from config.json"
        if found is not None:
            advice = f"{found} is in {_short(checkpoint.info(found).dtype)}, which is not supported here; {plain}"
        message = f"says that the weights are already quantized by '{method}', but none of the tensors is {sought}"
        raise UnsupportedModelError(f"{message}; {advice}", file=file)
    return kind


def _is_codes(checkpoint: Checkpoint, name: str, kind: _Kind) -> bool:
    return name.endswith(kind.codes) and kind.dtype in (None, checkpoint.info(name).dtype)


def _may_be_codes(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a tensor holds one or several matrices in a dtype other than floating point."""
    info = checkpoint.info(name)
    return len(info.shape) > 1 and info.dtype not in FLOATS


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class QuantizedCheckpoint(Checkpoint):
    """The weights of a quantized checkpoint.

    Attributes:
        method: its `quant_method`.
    """

    def __init__(self, original: Checkpoint, method: str, kind: _Kind) -> None:
        unquantized = {
            k: v for k, v in original.config.items() if k not in ("quantization_config", "compression_config")
        }
        super().__init__(original.path, unquantized, original.shards, original.files)
        self._original, self.method, self._kind = original, method, kind
        self._codes: dict[str, str] = {}
        taken: set[str] = set()
        infos: dict[str, TensorInfo] = {}
        for name in original.names():
            if _is_codes(original, name, kind):
                described = self._describe(name, taken)
                infos[described.name] = described
        for name in original.names():
            if name not in taken and not name.endswith(_ACTIVATIONS):
                infos[name] = original.info(name)
            if name not in taken and name.endswith(kind.companions):
                raise CheckpointError("belongs to no tensor of codes", file=original.info(name).file, tensor=name)
        self._tensors = infos
        self.notes = (*original.notes, self.note)

    def _describe(self, codes: str, taken: set[str]) -> TensorInfo:
        """Record a quantized weight and its tensors, and return its entry. The offset is unused."""
        kind, stem = self._kind, codes.removesuffix(self._kind.codes)
        parts = {kind.codes: codes} | {end: stem + end for end in kind.others if stem + end in self._original}
        for end in kind.others:
            if end not in parts and end not in kind.optional:
                message = f"has codes but no {stem}{end}"
                raise CheckpointError(message, file=self._original.info(codes).file, tensor=codes)
        infos = {end: self._original.info(name) for end, name in parts.items()}
        try:
            shape = kind.shape({end: info.shape for end, info in infos.items()})
        except (ValueError, IndexError) as cause:
            shapes = ", ".join(f"{info.name.rpartition('.')[2]} {list(info.shape)}" for info in infos.values())
            message = f"the shapes of codes and scales do not match: {shapes}"
            raise CheckpointError(message, file=infos[kind.codes].file, tensor=codes) from cause
        name = stem + kind.plain
        scales = infos[next(end for end in kind.others if "scale" in end)].dtype
        dtype = torch.float16 if scales == torch.float16 else torch.bfloat16
        self._codes[name] = stem
        taken.update(parts.values())
        return TensorInfo(name, shape, dtype, infos[kind.codes].file, 0, prod(shape) * dtype.itemsize)

    @property
    def bits(self) -> float:
        """Stored bits per decoded weight, including scales."""
        return self.stored_bits(self._codes.keys()) or 0.0

    def stored_bytes(self, name: str) -> int:
        """Return the stored bytes of a tensor, including codes, scales and zero points if it is quantized."""
        if name not in self._codes:
            return super().stored_bytes(name)
        return sum(info.nbytes for info in self.stored_infos(name))

    def stored_infos(self, name: str) -> tuple[TensorInfo, ...]:
        """Return the places of codes, scales and zero points, or of an unquantized tensor."""
        if name not in self._codes:
            return self._original.stored_infos(name)
        parts = [self._codes[name] + end for end in (self._kind.codes, *self._kind.others)]
        return tuple(self._original.info(part) for part in parts if part in self._original)

    def stored_bits(self, names: Collection[str]) -> float | None:
        """Return the stored bits per weight of some tensors, including scales; None if one is not quantized."""
        if not names or not self._codes.keys() >= set(names):
            return None
        weights = sum(prod(self.info(name).shape) for name in names)
        return 8 * sum(map(self.stored_bytes, names)) / max(weights, 1)

    @property
    def note(self) -> str:
        """A note for the user, as a sentence."""
        return (
            f"{len(self._codes)} tensors of the source are already quantized ({self.method}, {self.bits:.2f} bits per "
            "weight); the packed model keeps their quantization error."
        )

    def tensor(self, name: str) -> torch.Tensor:
        """Return the tensor, decoded if it is quantized. Errors as for the original's `tensor`."""
        return self._decoded(name, None) if name in self._codes else self._original.tensor(name)

    def part(self, name: str, expert: int) -> torch.Tensor:
        """Return one matrix of a stacked tensor, decoding only that matrix."""
        if name not in self._codes:
            return self._original.part(name, expert)
        return self._decoded(name, expert) if self._kind.stacked else self.tensor(name)[expert]

    def _decoded(self, name: str, expert: int | None) -> torch.Tensor:
        stem, kind = self._codes[name], self._kind
        ends = [end for end in (kind.codes, *kind.others) if stem + end in self._original]
        tensors = {end: self._original.tensor(stem + end) for end in ends}
        if expert is not None:
            experts = len(tensors[kind.codes])
            shared = {end for end, tensor in tensors.items() if tensor.ndim == 0 or len(tensor) != experts}
            tensors = {end: tensor if end in shared else tensor[expert] for end, tensor in tensors.items()}
        return kind.values(tensors).to(self.info(name).dtype).contiguous()

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return the bytes of the tensor in the dtype of `info`."""
        if name not in self._codes:
            return self._original.raw(name)
        data: npt.NDArray[np.uint8] = self.tensor(name).contiguous().reshape(-1).view(torch.uint8).numpy()
        return data


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)


def _fp8(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    block = settings.get("weight_block_size")
    end = "_scale_inv" if any(name.endswith("_scale_inv") for name in names) else "_scale"
    return _float8(end, None if block is None else (int(block[0]), int(block[1])))


def _modelopt(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    algorithm = settings.get("quant_algo") or (settings.get("quantization") or {}).get("quant_algo")
    known = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
    _require(algorithm in known, f"quant_algo {algorithm!r}; {' and '.join(known)} are read")
    return _fp8({}, names)


def _quark(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    weight = (settings.get("global_quant_config") or {}).get("weight") or {}
    found = weight.get("dtype"), weight.get("qscheme")
    _require(
        found[0] == "fp8_e4m3" and found[1] in ("per_tensor", "per_channel"),
        f"weights of dtype {found[0]!r} and qscheme {found[1]!r}; fp8_e4m3 per_tensor and per_channel are read",
    )
    return _fp8({}, names)


def _float_quantized(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    schemes = [group["weights"] for group in settings["config_groups"].values()]
    blocks = {tuple(scheme.get("block_structure") or ()) for scheme in schemes}
    kinds = {(scheme["num_bits"], scheme.get("type")) for scheme in schemes}
    _require(kinds == {(8, "float")}, f"{_listed(kinds)} in groups of float-quantized; 8-bit floats are read")
    _require(len(blocks) == 1, f"blocks of several sizes: {_listed(blocks)}")
    block = next(iter(blocks))
    return _float8("_scale", (int(block[0]), int(block[1])) if block else None)


def _listed(values: Collection[Any]) -> str:
    return ", ".join(sorted(map(str, values)))


def _float8(end: str, block: tuple[int, int] | None) -> _Kind:
    """Return the scheme of float8_e4m3fn codes, of a matrix or of stacked experts.

    There is one scale per block; without blocks, one per row, expert or tensor. Transposed stacked experts may have one
    scale per column.
    """

    def shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        found, scales = shapes[""], shapes[end]
        _require(len(found) in (2, 3), "matrix")
        lead, (rows, columns) = found[:-2], found[-2:]
        if block is not None:
            _require(scales == (*lead, -(-rows // block[0]), -(-columns // block[1])), "blocks")
        elif prod(scales) != 1:
            stacked = [(*lead, 1, columns), (*lead, 1, 1), lead] if lead else []
            _require(scales in [(*lead, rows, 1), (*lead, rows), *stacked], "rows")
        return found

    def values(tensors: Tensors) -> torch.Tensor:
        codes, scales = tensors[""].float(), tensors[end].float()
        if scales.numel() == 1:
            return codes * scales.reshape(())
        if block is not None:
            rows = scales.repeat_interleave(block[0], -2)[..., : codes.shape[-2], :]
            return codes * rows.repeat_interleave(block[1], -1)[..., : codes.shape[-1]]
        while scales.ndim < codes.ndim:
            scales = scales.unsqueeze(-1)
        return codes * scales

    return _Kind("", (end,), "", shape, values, stacked=True, dtype=torch.float8_e4m3fn)


_FP4 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The values of 4-bit floating-point codes (E2M1)."""


def _mxfp4(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    def shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        experts, rows, groups, width = shapes["_blocks"]
        _require(shapes["_scales"] == (experts, rows, groups), "groups")
        return experts, groups * width * 2, rows

    def values(tensors: Tensors) -> torch.Tensor:
        codes = tensors["_blocks"]
        pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        exponents = tensors["_scales"].to(torch.int32) - 127
        values: torch.Tensor = torch.ldexp(_FP4[pairs.long()], exponents.unsqueeze(-1)).flatten(-2)
        return values.mT

    return _Kind("_blocks", ("_scales",), "", shape, values, stacked=True)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes from 32-bit words, low bits first: shape (..., W) to (..., W * 32 / bits) int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes: torch.Tensor = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2)


def _compressed_tensors(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    kinds = {"pack-quantized": _pack_quantized, "float-quantized": _float_quantized}
    _require(settings.get("format") in kinds, f"format {settings.get('format')!r}; {' and '.join(kinds)} are read")
    return kinds[settings["format"]](settings, names)


def _pack_quantized(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    schemes = [group["weights"] for group in settings["config_groups"].values()]
    bits = {scheme["num_bits"] for scheme in schemes}
    _require(
        len(bits) == 1 and bits <= {4, 8},
        f"groups of {_listed(bits)} bits; only 4 or 8 bits, the same in all groups, are supported",
    )
    (width,) = bits
    zeros, order = "weight_zero_point", "weight_g_idx"

    def shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        (rows, words), (scaled, groups) = shapes["weight_packed"], shapes["weight_scale"]
        columns = words * 32 // width
        _require(rows == scaled and groups > 0 and columns % groups == 0, "groups")
        _require(shapes.get(zeros, (-(-rows * width // 32), groups)) == (-(-rows * width // 32), groups), "zero points")
        _require(shapes.get(order, (columns,)) == (columns,), "order of columns")
        return rows, columns

    def values(tensors: Tensors) -> torch.Tensor:
        codes, scales = _unpacked(tensors["weight_packed"], width), tensors["weight_scale"].float()
        group = tensors[order].long() if order in tensors else _groups(codes.shape[1], scales.shape[1])
        zero = torch.tensor([[1 << width - 1]], dtype=torch.int32)
        if zeros in tensors:  # packed along the rows
            zero = _unpacked(tensors[zeros].mT.contiguous(), width).mT[: len(codes), group]
        return (codes - zero).float() * scales[:, group]

    others = ("weight_scale", "weight_shape", zeros, order)
    return _Kind("weight_packed", others, "weight", shape, values, optional=others[1:])


def _grouped_shape(codes: tuple[int, ...], scales: tuple[int, ...], zeros: tuple[int, ...]) -> tuple[int, ...]:
    """Return the weight shape (R, C) of gptq and awq from the shape (C, R) of the codes."""
    columns, rows = codes
    _require(scales[1] == rows and zeros == (scales[0], rows // 8) and columns % scales[0] == 0, "groups")
    return rows, columns


def _gptq(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    _require(settings.get("bits") == 4, f"{settings.get('bits')} bits; 4 are read")
    one = int(settings.get("checkpoint_format", "gptq") == "gptq")  # version 1 stores zero points minus one

    def shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        words, rows = shapes["qweight"]
        return _grouped_shape((8 * words, rows), shapes["scales"], shapes["qzeros"])

    def values(tensors: Tensors) -> torch.Tensor:
        codes, scales = _unpacked(tensors["qweight"].mT.contiguous(), 4), tensors["scales"].float()
        zeros = _unpacked(tensors["qzeros"], 4) + one
        group = tensors["g_idx"].long() if "g_idx" in tensors else _groups(codes.shape[1], len(scales))
        return (codes - zeros[group].mT).float() * scales[group].mT

    return _Kind("qweight", ("qzeros", "scales", "g_idx"), "weight", shape, values, optional=("g_idx",))


_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of its eight rows."""


def _awq(settings: Mapping[str, Any], names: Collection[str]) -> _Kind:
    _require(settings.get("bits") == 4, f"{settings.get('bits')} bits; 4 are read")
    version = settings.get("version", "gemm")
    _require(str(version).lower() == "gemm", f"version {version!r}; 'gemm' is read")

    def shape(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        columns, words = shapes["qweight"]
        return _grouped_shape((columns, 8 * words), shapes["scales"], shapes["qzeros"])

    def values(tensors: Tensors) -> torch.Tensor:
        codes, zeros = (_in_order(_unpacked(tensors[end], 4)) for end in ("qweight", "qzeros"))
        group = _groups(len(codes), len(zeros))
        return ((codes - zeros[group]).float() * tensors["scales"].float()[group]).mT

    return _Kind("qweight", ("qzeros", "scales"), "weight", shape, values)


def _in_order(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(len(codes), -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1)


def _groups(columns: int, count: int) -> torch.Tensor:
    """Return the group index of each column."""
    return torch.arange(columns) // (columns // count)


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Collection[str]], _Kind]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "quark": _quark,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}
