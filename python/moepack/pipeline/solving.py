"""The main loop of a compression: the model runs layer by layer, and each layer is packed while it runs.

`work` solves and answers the stages of a layer; an executor decides where.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moepack.calibration import Calibrator, LayerRun, Weights
from moepack.calibration.stage import PackedLayer, layer_tensors
from moepack.checkpoint import Checkpoint, DenseLayer, MoeModel
from moepack.checkpoint.dense import EMBEDDING
from moepack.methods import MethodPlan, PackedBytes
from moepack.pipeline.assignment import PlannedAssignment
from moepack.pipeline.costs import in_file
from moepack.pipeline.executor import Executor, Here, Unit
from moepack.pipeline.work import Packed

__all__ = ["LayerPacker"]


class LayerPacker:
    """Packs the layers of a checkpoint.

    Attributes:
        layers: the layers to pack, in execution order.
        samples: the calibration set, or None.
        spent: see `Stage.spent`; `record_sizes` adds to it.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: MoeModel,
        assignment: PlannedAssignment,
        advance: Callable[[int], None] = lambda _: None,
        executor: Executor | None = None,
    ) -> None:
        """Load the calibration set if a method needs one.

        Raises:
            CalibrationError: the calibration set is unusable.
            ValueError: the assignment is inconsistent or does not fit the model.
        """
        self.assignment, self.executor = assignment, executor or Here()
        self.layers = assignment.layers(model)
        self._beyond = {layer.name for layer in model.beyond}
        request = assignment.request
        self.samples = None if request is None else request.load(checkpoint)
        self._calibrator: Calibrator | None = None
        if request is not None and self.samples is not None:
            self._calibrator = Calibrator(checkpoint, model, self.samples, request.settings)
        self.spent: dict[str, int] = {}
        self.executor.start(assignment, self.layers, advance, self.spent)

    def keep_states_in(self, directory: Path) -> None:
        """Keep hidden states in files of a directory if they are large beside the model's layers.

        They are mapped, so the system may write them to the disk when other programs need the memory.
        """
        calibrator = self._calibrator
        if calibrator is None or self.samples is None or calibrator.settings.device.type != "cpu":
            return
        config = calibrator.skeleton.config
        width = int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0))
        weights = max(sum(math.prod(each.shape) for each in layer_tensors(layer).values()) for layer in self.layers)
        if in_file(self.samples.inputs.numel(), width, weights):
            calibrator.settings = replace(calibrator.settings, buffer_directory=directory)

    def runs(self) -> Generator[LayerRun | None]:
        """Yield a run of the model for each of `layers`, or None for layers whose inputs are not needed.

        Pack each layer before requesting the next run. Closing the iterator drops the hidden states, whose files can
        then be removed. Raises as `Calibrator.layers`.
        """
        if self._calibrator is None:
            yield from (None for _ in self.layers)
            return
        reached = [layer for layer in self.layers if not self._is_unreached(layer)]
        runs: Any = self._calibrator.layers({layer.name: layer for layer in reached if isinstance(layer, DenseLayer)})
        try:
            for layer in self.layers:
                yield None if self._is_unreached(layer) else next(runs)
        finally:
            runs.close()
            self._calibrator.forget()

    def _is_unreached(self, layer: PackedLayer) -> bool:
        """Return whether calibration skips a layer: the embedding, the head, and layers that the model lacks."""
        return layer.name in self._beyond or _is_end(layer)

    @property
    def activations(self) -> dict[str, float]:
        """The largest magnitude of activations by block and by layer of experts; empty without calibration."""
        return {} if self._calibrator is None else dict(self._calibrator.largest)

    def expect(self, layers: Sequence[PackedLayer]) -> None:
        """Announce which of `layers` will be packed from scratch, in order; an executor may start on them early."""
        self.executor.expect([Unit(layer, name) for layer in layers for name in self._alone(layer)])

    def _alone(self, layer: PackedLayer) -> list[str]:
        """Return the names of a layer's tensors whose methods use weights only; they are packed independently."""
        unseen = self._calibrator is None or self._is_unreached(layer)
        return [name for name, weights in layer_tensors(layer).items() if self._looks_at_weights(weights, unseen)]

    def _looks_at_weights(self, weights: Weights, unseen: bool) -> bool:
        chosen = self.assignment.of(weights)
        return isinstance(chosen, MethodPlan) and (unseen or chosen.request is None)

    def pack(self, layer: PackedLayer, run: LayerRun | None, done: Packed) -> dict[str, PackedBytes]:
        """Pack a layer.

        Args:
            layer: one of `layers`.
            run: the corresponding item of `runs`.
            done: tensors of the layer that are already packed.

        Raises:
            InvalidTensorError: weights that cannot be compressed; names the tensor.
            CalibrationError: the model computes NaN or infinity in its experts.
            ClusterError: machines of the cluster fail.
            DeviceMemoryError: the device has too little memory.
        """
        packed, tensors = dict(done), layer_tensors(layer)
        elsewhere = {name: self.assignment.of(weights) for name, weights in tensors.items() if name not in packed}
        packed |= {name: chosen for name, chosen in elsewhere.items() if isinstance(chosen, PackedBytes)}
        packed |= {name: self.executor.tensor(Unit(layer, name)) for name in self._alone(layer) if name not in packed}
        if run is not None:
            packed |= self.executor.run(run, packed)
        return {name: packed[name] for name in tensors}

    def record_sizes(self, layer: PackedLayer, packed: Packed) -> None:
        """Record the sizes of a layer's tensors, packed now or by an interrupted run, for the layers after it."""
        if layer.name not in self._beyond:
            self.spent |= {each.name: packed[name].data.nbytes for name, each in layer_tensors(layer).items()}


def _is_end(layer: PackedLayer) -> bool:
    """Return whether a layer is the embedding or the output head; calibration runs only what lies between them."""
    return isinstance(layer, DenseLayer) and any(linear.role in (EMBEDDING, "head") for linear in layer.linears)
