"""Runs a decoder that is larger than memory, block by block over all windows.

The hidden states of all windows pass through one block after the other, so each weight is read from the checkpoint only
once. Hidden states are in mapped files, which the system can write out.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from moepack.calibration.run import Calibrator
from moepack.calibration.samples import decoder_samples
from moepack.calibration.settings import CalibrationSettings
from moepack.calibration.tail import Tail
from moepack.checkpoint import Checkpoint, describe
from moepack.errors import UnsupportedModelError
from moepack.evaluation.windows import batch_size

__all__ = ["StreamedDecoder"]


class StreamedDecoder:
    """A checkpoint that predicts windows without being loaded completely.

    Attributes:
        module: the transformers model. Its parts are loaded only while they run.

    Args:
        checkpoint: the checkpoint.
        ids: [N, L] int64, the windows to predict.
        dtype: dtype of weights and hidden states.
        scratch: a directory for the hidden states: 2 * N * L * H elements.
        device: where blocks run.

    Raises:
        CheckpointError, UnsupportedModelError: the checkpoint cannot be read or run in parts.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        ids: torch.Tensor,
        dtype: torch.dtype,
        scratch: Path,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model = describe(checkpoint)
        if checkpoint.config.get("is_encoder_decoder"):
            raise UnsupportedModelError(
                "an encoder-decoder can be a reference only if it fits in memory", file=checkpoint.path
            )
        self._settings = CalibrationSettings(
            "original", group=1, dtype=dtype, device=torch.device(device), buffer_directory=scratch
        )
        self._calibrator = Calibrator(checkpoint, self._model, decoder_samples(ids), self._settings)
        self.module: Any = self._calibrator.skeleton.module
        self.config = self._calibrator.skeleton.config

    @torch.inference_mode()
    def logits(self, passed: Callable[[int, int], None]) -> Iterator[torch.Tensor]:
        """Run all blocks, then yield the logits [B, L, V] of each batch.

        Args:
            passed: called after each layer of experts with the numbers of finished and of all layers.
        """
        for done, layer in enumerate(self._calibrator.layers(), 1):
            layer.keep()
            passed(done, len(self._model.layers))
        hidden, ids = self._calibrator.hidden, self._calibrator.samples.inputs
        tail, size = Tail(self._calibrator.skeleton, self._calibrator.stack), batch_size(self.config)
        with tail.loaded():
            tail.require_last_alone(ids[:1], hidden.samples(0, 1))
            for first in range(0, len(hidden), size):
                last = min(first + size, len(hidden))
                yield tail.logits(ids[first:last], hidden.samples(first, last))
