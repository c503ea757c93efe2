"""Records the predictions of a reference in a file, for comparison with any number of models.

A row of log-probabilities has one entry per token of the vocabulary (32,000 to 200,000), but it is a function of the
input of the output head (2,048 to 8,192 numbers). The file therefore stores that input, and the head once. The
comparison repeats the product, so KL and agreement cover the full vocabulary. If a model does more after its head than
scaling, or the vocabulary is smaller, the logits themselves are stored.

The file is a safetensors file: `states` [T, H] (or [T, V]) for the T predicted tokens, `head` [V, H] in bf16 if that is
exact, and `bias`; about T * H * 4 bytes: 1 GB for 250,000 characters and H = 4096. Its metadata identify the text and
its tokens.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from moepack.checkpoint.quantized import open_checkpoint
from moepack.checkpoint.resolve import resolve_model
from moepack.decoding.finite import advice, are_finite
from moepack.decoding.vocabulary import naming
from moepack.errors import CorruptionError, MoepackError, NonFiniteError, ReferenceMismatchError
from moepack.evaluation.models import Progress, Source, dtype_of, is_loaded, open_source, run, tokenizer_of
from moepack.evaluation.streaming import StreamedDecoder
from moepack.evaluation.windows import Windows, batches, read_windows
from moepack.format.atomic import publish_file, write_all
from moepack.format.header import DTYPES
from moepack.format.shard import DTYPE_NAMES
from moepack.integrations.loading import is_packed
from moepack.integrations.options import LoadOptions
from moepack.memory import PeakMemory, available_bytes
from moepack.precision import single_precision

__all__ = ["Reference", "record_reference"]

FORMAT = "moepack-reference"
VERSION = "1"
STATES, HEAD, BIAS = "states", "head", "bias"
Advance = Callable[[int, int], None]
"""Called with the numbers of finished and of all windows or layers."""

MARGIN = 1.2
"""A model is loaded completely if its size times this factor fits in free memory. The rest is for activations."""


@dataclass(frozen=True)
class _Head:
    """Computes logits from the input of the output head: scale * (states weight^T + bias); weight [V, H]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scale: float

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.to(states.dtype)
        return (F.linear(states, self.weight.to(states.dtype), bias) * self.scale).float()

    @classmethod
    def of(cls, module: Any, config: Any, states: torch.Tensor, logits: torch.Tensor) -> Self | None:
        """Return the head if it alone maps `states` [T, H] to `logits` [T, V] and H < V; None otherwise."""
        weight = getattr(module, "weight", None)
        if weight is None or weight.ndim != 2 or logits.shape[-1] <= states.shape[-1]:
            return None
        head = cls(weight.detach(), getattr(module, "bias", None), 1 / getattr(config, "logits_scaling", 1.0))
        exact = 1e-4 if states.dtype == torch.float32 else 2e-2
        return head if torch.allclose(head(states), logits, exact, exact * float(logits.abs().max())) else None


class Reference:
    """A recorded reference, open for reading.

    Attributes:
        file: path of the file.
        seq2seq: whether the reference is an encoder-decoder.
        tokens: number of predicted tokens.
        peak_memory: peak anonymous memory during recording, in bytes; 0 if the file was only opened.
    """

    def __init__(self, file: str | PathLike[str]) -> None:
        """Open a file written by `record_reference`.

        Raises:
            CorruptionError: the file is not a recorded reference, or is damaged.
        """
        self.file, self.peak_memory = Path(file), 0
        self._scratch: TemporaryDirectory[str] | None = None
        try:
            self._open()
        except (OSError, KeyError, ValueError, SafetensorError) as error:
            if isinstance(error, MoepackError):
                raise
            raise CorruptionError(f"is not a recorded reference: {error}", file=file) from error

    def _open(self) -> None:
        content = _mapped(self.file)
        about = content.metadata() or {}
        if (about.get("format"), about.get("version")) != (FORMAT, VERSION):
            raise CorruptionError(f"is not a reference of version {VERSION} saved by `moepack eval`", file=self.file)
        self._text, self._ids = about["text"], about["tokens"]
        self.seq2seq = about["kind"] == "encoder-decoder"
        self._states = content.get_slice(STATES)
        self.tokens, width = self._states.get_shape()
        names, dtype = content.keys(), DTYPES[self._states.get_dtype()]
        weight, bias = (content.get_tensor(name).to(dtype) if name in names else None for name in (HEAD, BIAS))
        self._head = None if weight is None else _Head(weight, bias, float(about["scale"]))
        if self._head is not None and self._head.weight.shape[1] != width:
            raise CorruptionError("the shapes of states and head do not match", file=self.file, tensor=HEAD)

    def check(self, windows: Windows, seq2seq: bool) -> None:
        """Check that the reference was recorded for these windows.

        Raises:
            ReferenceMismatchError: it was recorded for another text, other tokens or another kind of model.
        """
        if seq2seq != self.seq2seq:
            message = "the reference and the model have different architectures: one is an encoder-decoder"
        elif windows.text != self._text:
            message = "was recorded for another text, or for another number of characters"
        elif windows.tokens != self._ids:
            message = "was recorded with another tokenizer: the text has different tokens"
        else:
            return
        raise ReferenceMismatchError(message, file=self.file)

    def logits(self, first: int, last: int) -> torch.Tensor:
        """Return the logits of predicted tokens `first` to `last`, float32 [last - first, V]."""
        states = self._states[first:last]
        return states.float() if self._head is None else self._head(states)


def _mapped(file: Path) -> Any:
    return safe_open(file, "pt")


@torch.inference_mode()
@single_precision()
def record_reference(
    model: Source,
    text: str | PathLike[str],
    chars: int = 250_000,
    file: str | PathLike[str] | None = None,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | str = torch.float32,
    memory: int | None = None,
    progress: Progress | None = None,
    **loading: Any,
) -> Reference:
    """Record the predictions of a model on a text.

    Args:
        model: a directory, a Hub id, or a loaded model, which needs `tokenizer`.
        text, chars: as for `evaluate`.
        file: file to write; None uses a temporary file that is deleted with the result.
        tokenizer: the tokenizer; None loads that of the `model` directory.
        dtype: dtype of a model loaded here.
        memory: maximum bytes of a model loaded here; None means the free memory. A larger decoder runs block by block
            from its checkpoint.
        progress: called with (done, total, NaN), counting windows, or layers if the model runs block by block.
        **loading: `device` or `device_map` of `moepack.load`.

    Raises:
        LoadError, CheckpointError, UnsupportedModelError: the model or tokenizer cannot be loaded or run in parts.
        NonFiniteError, CalibrationError: the model computes NaN or infinity; the message names the layer.
        TokenError: the model's embedding has no row for a token of the text.
        ValueError: the text is shorter than one window.
        DiskError: the file cannot be written.
    """
    tokenizer = tokenizer_of(model, tokenizer)
    windows = read_windows(Path(text), chars, tokenizer)
    peak = PeakMemory()

    def advance(done: int, total: int) -> None:
        peak.sample()
        if progress is not None:
            progress(done, total, float("nan"))

    with ExitStack() as left, naming(tokenizer, text):
        scratch = TemporaryDirectory(prefix="moepack-reference-")
        left.callback(scratch.cleanup)
        target = Path(scratch.name) / "reference.safetensors" if file is None else Path(file)
        predictor: _Loaded | _Streamed
        if is_loaded(model) or loading or fits(model, dtype_of(dtype), memory):
            predictor = _Loaded(open_source(model, LoadOptions(dtype=dtype, **loading)), advance)
        else:
            predictor = _Streamed(resolve_model(model), windows, dtype_of(dtype), Path(scratch.name), advance)
        with publish_file(target) as stream:
            _write(stream, predictor, windows, tokenizer)
        del predictor
        reference = Reference(target)
        if file is None:
            left.pop_all()
            reference._scratch = scratch
    reference.peak_memory = peak.bytes
    return reference


def fits(model: str | PathLike[str], dtype: torch.dtype | None, memory: int | None = None) -> bool:
    """Return whether a model can be loaded completely. True for packed models, which are mapped, and if unknown.

    Args:
        model: a directory or Hub id.
        dtype: dtype of the floating-point weights; None keeps the checkpoint's.
        memory: maximum bytes; None means the free memory.
    """
    directory = resolve_model(model)
    free = available_bytes() if memory is None else memory
    try:
        if free is None or is_packed(directory):
            return True
        checkpoint = open_checkpoint(directory)
    except MoepackError:
        return True  # loading reports the error
    infos = [checkpoint.info(name) for name in checkpoint.names()]
    sizes = (info.nbytes // info.dtype.itemsize * (dtype or info.dtype).itemsize for info in infos)
    return MARGIN * sum(sizes) < free


class _Loaded:
    """A model in memory, as what predicts."""

    def __init__(self, model: Any, advance: Advance) -> None:
        self.module, self.config, self._advance = model, model.config, advance

    def logits(self, windows: Windows, tokenizer: Any) -> Iterator[torch.Tensor]:
        for done, inputs, _ in batches(self.config, windows, tokenizer):
            yield run(self.module, inputs)
            self._advance(done, len(windows))


class _Streamed:
    """A decoder that is read block by block, as what predicts."""

    def __init__(
        self, directory: Path, windows: Windows, dtype: torch.dtype | None, scratch: Path, advance: Advance
    ) -> None:
        ids = torch.from_numpy(windows.ids)
        self._decoder = StreamedDecoder(open_checkpoint(directory), ids, dtype or torch.float32, scratch)
        self.module, self.config, self._advance = self._decoder.module, self._decoder.config, advance

    def logits(self, windows: Windows, tokenizer: Any) -> Iterator[torch.Tensor]:
        for logits in self._decoder.logits(self._advance):
            if not are_finite(logits):
                where = "NaN or infinity first appears behind the last block"
                raise NonFiniteError(f"the model's logits are not finite: {where}; {advice(logits.dtype)}")
            yield logits


def _write(stream: FileIO, predictor: _Loaded | _Streamed, windows: Windows, tokenizer: Any) -> None:
    """Write the file: its head and header with the first batch, states as they are computed."""
    kept = [targets >= 0 for _, _, targets in batches(predictor.config, windows, tokenizer)]
    tokens = sum(int(keep.sum()) for keep in kept)
    module, entered = predictor.module.get_output_embeddings(), []
    hook = module.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    head, started = None, False
    try:
        for keep, logits in zip(kept, predictor.logits(windows, tokenizer), strict=True):
            keep, states = keep.to(logits.device), entered.pop()
            known, states = logits[keep], states.reshape(*keep.shape, -1)[keep]
            if not started:
                head, started = _Head.of(module, predictor.config, states, known.float()), True
                _begin(stream, head, tokens, states if head else known, _about(predictor.config, windows))
            _append(stream, states if head else known)
    finally:
        hook.remove()


def _about(config: Any, windows: Windows) -> dict[str, str]:
    kind = "encoder-decoder" if config.is_encoder_decoder else "decoder"
    return {"format": FORMAT, "version": VERSION, "kind": kind, "text": windows.text, "tokens": windows.tokens}


def _begin(stream: FileIO, head: _Head | None, tokens: int, states: torch.Tensor, about: dict[str, str]) -> None:
    """Write the header and the head; `states` has the width and dtype of what follows, [tokens, width]."""
    parts = {} if head is None else {HEAD: _narrow(head.weight), **({} if head.bias is None else {BIAS: head.bias})}
    header: dict[str, Any] = {"__metadata__": {**about, "scale": repr(head.scale if head else 1.0)}}
    offset = 0
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in parts.items()}
    for name, (dtype, shape) in {**shapes, STATES: (states.dtype, (tokens, states.shape[1]))}.items():
        end = offset + dtype.itemsize * torch.Size(shape).numel()
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_all(stream, memoryview(len(text).to_bytes(8, "little") + text))
    for tensor in parts.values():
        _append(stream, tensor)


def _append(stream: FileIO, tensor: torch.Tensor) -> None:
    data: Any = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    write_all(stream, memoryview(data).cast("B"))


def _narrow(weight: torch.Tensor) -> torch.Tensor:
    """The weight in bf16 where that holds it exactly: a checkpoint in bf16 that was loaded in float32."""
    narrow = weight.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight
