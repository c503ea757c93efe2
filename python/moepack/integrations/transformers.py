"""Loads packed directories through transformers: `AutoModelForCausalLM.from_pretrained(directory)`.

The config of a packed directory names the quantization method `moepack`. Transformers builds the model on the meta
device, calls `MoepackQuantizer`, loads the weights, and calls it again. Before loading, every packed module (experts, a
linear layer, the embedding) is replaced by one without parameters for packed weights. Transformers then finds nothing
to load, convert, cast or initialize there, and never touches a packed byte. Packed tensors match no parameter and are
declared as expected leftovers. After loading, the mapped bytes are attached. The loader's renaming and conversion
rules, which differ between versions, therefore cannot interfere, and packed weights add no anonymous memory.

Transformers without moepack must fail on such a directory and not initialize random experts. Each layer therefore has a
packed tensor under a name that the stock model has with another shape (`experts.down_proj`, the first expert of Switch,
or the `weight` of a linear layer).
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moepack.backends import is_silu
from moepack.checkpoint.experts import ExpertsForm, form_of
from moepack.decoding.carried import carried_of
from moepack.decoding.decoder import install as install_decoder
from moepack.decoding.vocabulary import watch
from moepack.errors import CorruptionError, LoadError, UnsupportedModelError
from moepack.format.directory import check_listed
from moepack.format.plausible import SMALL
from moepack.integrations.decoding import decode_model, keep_scales
from moepack.integrations.placement import Placement, has_gpu, reserve
from moepack.integrations.resizing import Resizer
from moepack.integrations.saving import Saver
from moepack.modules.embedding import PackedEmbedding
from moepack.modules.experts import (
    PackedEveryExperts,
    PackedExpertProducts,
    PackedExperts,
    PackedIdentityExperts,
    PackedOwnExperts,
    PackedPlainExperts,
    PackedSwitchExperts,
    RefinedExperts,
    SparseExperts,
)
from moepack.modules.linear import PackedLinear
from moepack.stores.mapped import MappedStore
from moepack.stores.uploaded import DeviceStore

__all__ = ["METHOD", "MoepackConfig", "MoepackQuantizer", "install"]

METHOD = "moepack"
SUPPORTED_VERSION = 1

Replacement = (
    PackedExperts
    | PackedOwnExperts
    | PackedExpertProducts
    | PackedSwitchExperts
    | SparseExperts
    | PackedLinear
    | PackedEmbedding
)
Shapes = dict[str, tuple[int, ...]]
ExpertShapes = dict[str, tuple[int, int, int]]

LINEAR = "weight"
"""The only projection of a packed linear layer or embedding."""


class MoepackConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of a packed directory.

    Args:
        version: format version of the directory.
        packed: maps the path of each experts module to the shape (E, R, C) of each packed projection, and the path of
            each packed linear layer or embedding to {"weight": (R, C)}.
        **settings: informative settings of the compression method (method, code and so on).

    Raises:
        LoadError: the directory needs a newer moepack.
        CorruptionError: the entries do not follow the format.
    """

    def __init__(self, version: int = 0, packed: Mapping[str, Any] | None = None, **settings: Any) -> None:
        if type(version) is not int or version < 1:
            raise CorruptionError(f"quantization_config: bad format version {version!r}", file="config.json")
        if version > SUPPORTED_VERSION:
            raise LoadError(
                f"the directory has format version {version}, but this moepack reads up to {SUPPORTED_VERSION}: "
                "upgrade moepack (pip install --upgrade moepack)",
                file="config.json",
            )
        settings["quant_method"] = METHOD
        self.__dict__.update(settings)
        self.version = version
        self.packed = _checked_packed(packed)


def _checked_packed(packed: Any) -> dict[str, dict[str, list[int]]]:
    """Check that `packed` maps modules to projections to shapes, and return it."""
    if not isinstance(packed, Mapping):
        raise CorruptionError("quantization_config lists no packed modules", file="config.json")
    for module, shapes in packed.items():
        if not isinstance(shapes, Mapping) or not _are_shapes(shapes):
            raise CorruptionError(f"quantization_config: bad packed shapes of '{module}'", file="config.json")
    return {module: {name: list(shape) for name, shape in shapes.items()} for module, shapes in packed.items()}


def _are_shapes(shapes: Mapping[str, Any]) -> bool:
    """Return whether a module's shapes are [rows, columns] of a linear layer or [experts, rows, columns] of experts."""
    rank = 2 if set(shapes) == {LINEAR} else 3
    return all(_is_shape(shape, rank) for shape in shapes.values())


def _is_shape(shape: Any, rank: int) -> bool:
    sizes = shape if isinstance(shape, list | tuple) else ()
    return len(sizes) == rank and all(type(size) is int and size >= 0 for size in sizes)


class MoepackQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts packed modules into a model that transformers loads. The module docstring describes how."""

    requires_calibration = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placement = Placement({})
        self._model: Any = None
        self._modules: dict[str, Replacement] = {}
        self._paths: dict[str, str] = {}
        self._tied: dict[str, str] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Check the device map. Transformers calls this again after it has resolved an automatic map.

        Raises:
            LoadError: the device map names a device on which packed weights do not run.
            DeviceMemoryError: a GPU has too little memory for its part of the model.
        """
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict):
            self._placement = Placement(device_map)
            self._settle()

    def update_device_map(self, device_map: Any) -> Any:
        """Replace automatic maps ("auto", "balanced" and so on) by the CPU if there is no GPU."""
        return {"": torch.device("cpu")} if isinstance(device_map, str) and not has_gpu() else device_map

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        files = kwargs.get("checkpoint_files")
        if not files:
            raise LoadError("a packed model is loaded from a directory, not from a state dict")
        self._directory = _open_directory(Path(files[0]).parent, model)
        check_listed(map(Path, files), self._directory.manifest)
        leftovers = set(model._keys_to_ignore_on_load_unexpected or ())
        for recorded, shapes in self.quantization_config.packed.items():
            path = _module_path(model, recorded)
            module = _packed_module(model.get_submodule(path), path, {k: tuple(v) for k, v in shapes.items()})
            model.set_submodule(path, module)
            _mark_initialized(model, path)
            self._modules[recorded], self._paths[recorded] = module, path
            leftovers.add(rf"(^|\.){re.escape(path)}\.")
            if isinstance(module, PackedEmbedding):
                self._share_with_heads(model, recorded)
        beyond = {record.module for record in self._directory.manifest.packed().values() if record.beyond}
        model._keys_to_ignore_on_load_unexpected = leftovers | {rf"(^|\.){re.escape(path)}\." for path in beyond}
        _refuse_oversized(model, self._directory)
        self._dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._model = model
        if (device_map := kwargs.get("device_map")) is not None:
            records = self._directory.manifest.tensors
            for recorded, module in self._modules.items():
                reserve(module, {projection: records[name] for projection, name in self._names(recorded, module)})
            self.validate_environment(device_map=device_map)
        return model

    def _share_with_heads(self, model: Any, recorded: str) -> None:
        """Replace heads tied to a packed embedding by packed heads that use its bytes, and drop the tie."""
        tied, embedding = model.all_tied_weights_keys, self._modules[recorded]
        for weight in [target for target, source in tied.items() if source == f"{self._paths[recorded]}.weight"]:
            path = weight.removesuffix(".weight")
            head = _packed_linear(model.get_submodule(path), path, embedding.shapes["packed"][1:])
            model.set_submodule(path, head)
            _mark_initialized(model, path)
            self._modules[path], self._paths[path], self._tied[path] = head, path, recorded
            del tied[weight]

    def _settle(self) -> None:
        """Apply the device map to the packed modules, once both are known."""
        if self._model is not None:
            self._placement.settle({self._paths[recorded]: module for recorded, module in self._modules.items()})
            self._placement.check_memory(self._model)

    def _names(self, recorded: str, module: Replacement) -> Iterator[tuple[str, str]]:
        """Yield each projection of a packed module and the name of its tensor.

        Raises:
            CorruptionError: the manifest lacks a projection.
        """
        directory = self._directory
        names = {(record.module, record.projection): name for name, record in directory.manifest.packed().items()}
        for projection in module.projections:
            matrix = isinstance(module, PackedLinear | PackedEmbedding)
            name = names.get((self._tied.get(recorded, recorded), LINEAR if matrix else projection))
            if name is None:
                message = f"the manifest lists no {projection} of '{recorded}', which config.json lists as packed"
                raise CorruptionError(message, file=directory.path / "moepack.json")
            yield projection, name

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        directory, tensors = self._directory, self._directory.tensors()
        stores: dict[torch.device, MappedStore] = {torch.device("cpu"): MappedStore()}
        for recorded, module in self._modules.items():
            device = self._placement.device_of(self._paths[recorded])
            if device not in stores:
                stores[device] = DeviceStore(device)
            for projection, name in self._names(recorded, module):
                file = directory.path / directory.manifest.tensors[name].file
                if isinstance(module, PackedEmbedding) and device.type != "cpu":
                    module.decode(tensors[name], device)
                else:
                    stores[device].put(module, projection, tensors[name], file=file, tensor=name)
        keep_scales(model, directory.path, self._modules.values())
        _cast_renamed(model, self._dtypes)
        install_decoder(model)
        watch(model)
        carried_of(model)
        model.save_pretrained = Saver(directory.path, model)
        if any(isinstance(module, PackedEmbedding | PackedLinear) for module in _vocabulary(model)):
            model.resize_token_embeddings = Resizer(model)
        del self._directory, self._modules, self._paths, self._tied, self._dtypes, self._model
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Decode the packed weights of a loaded model in place. Raises the errors of `decode_model`."""
        decode_model(model, dtype or model.dtype)
        return model

    def is_serializable(self) -> bool:
        """Return True: `save_pretrained` of a loaded model is a `Saver`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: gradients pass through packed weights to adapters (`moepack.integrations.lora`)."""
        return True


def _vocabulary(model: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """The embedding and the head of a model, if it has them."""
    try:
        return model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:
        return None, None


def install() -> None:
    """Register the configuration and the quantizer. Idempotent; a reloaded moepack replaces the old classes."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = MoepackConfig
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = MoepackQuantizer


def _open_directory(path: Path, model: Any) -> Any:
    """Open the packed directory. For a Hub model, fetch the manifest first, because transformers does not."""
    from moepack.format import PackedDirectory

    if not (path / "moepack.json").exists() and not Path(model.config.name_or_path).is_dir():
        from transformers.utils import cached_file

        commit = getattr(model.config, "_commit_hash", None)
        try:
            cached_file(model.config.name_or_path, "moepack.json", revision=commit, _commit_hash=commit)
        except OSError as error:
            raise LoadError(f"cannot download the manifest: {error}", file=path / "moepack.json") from error
    return PackedDirectory.open(path)


def _refuse_oversized(model: Any, directory: Any) -> None:
    """Reject a model that is much larger than its files, because transformers would allocate the missing weights.

    Raises:
        LoadError: the unpacked parameters number more than twice the values that the directory holds for them.
    """
    stored = sum(math.prod(record.shape) for record in directory.manifest.tensors.values() if not record.packed)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    wanted = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tied)
    if wanted > 2 * stored + SMALL:
        message = f"describes {wanted} values outside the packed modules, but the files hold {stored}"
        raise LoadError(message, file=directory.path / "config.json")


def _module_path(model: Any, recorded: str) -> str:
    """Return the path of a packed module in this model. The recorded path is that in the model with its head.

    Raises:
        LoadError: the model has no such module.
    """
    prefix = f"{model.base_model_prefix}."
    for path in (recorded, recorded.removeprefix(prefix), prefix + recorded):
        try:
            model.get_submodule(path)
        except AttributeError:
            continue
        return path
    import transformers

    raise LoadError(
        f"{type(model).__name__} of transformers {transformers.__version__} has no module '{recorded}', which the "
        "directory lists as packed; another version of transformers may have it (5.20 and newer do)"
    )


def _mark_initialized(model: Any, path: str) -> None:
    """Keep transformers from initializing the packed module, and its parent, whose initializer would access it."""
    parent, _, _ = path.rpartition(".")
    model.get_submodule(path)._is_hf_initialized = True
    if "." in parent:  # the parent of embedding and head is the whole model
        model.get_submodule(parent)._is_hf_initialized = True


def _cast_renamed(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Cast parameters that the loader left in the wrong dtype.

    Up to 5.20, transformers leaves a parameter of a quantized model in the checkpoint's dtype if it was renamed, such
    as Mixtral's router. Parameters that a model keeps in float32 on purpose are not cast.
    """
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        wanted = dtypes.get(name, parameter.dtype)
        if parameter.dtype != wanted and parameter.is_floating_point() and not kept & set(name.split(".")):
            parameter.data = parameter.data.to(wanted)


def _packed_module(original: Any, path: str, shapes: Shapes) -> Replacement:
    """Return the packed counterpart of an experts module, a linear layer or an embedding.

    Raises:
        LoadError: the directory's shapes differ from the model's configuration.
        UnsupportedModelError: no packed module computes the same.
    """
    if set(shapes) == {LINEAR}:
        make = _packed_embedding if isinstance(original, nn.Embedding) else _packed_linear
        return make(original, path, shapes[LINEAR])
    form = form_of(original)
    if isinstance(original, nn.ModuleDict) and set(shapes) == set(PackedSwitchExperts.projections):
        expected, act_fn = _switch_layout(original)
        _require_shapes(path, shapes, expected)
        return PackedSwitchExperts(expected, act_fn)
    for twin in (SparseExperts, RefinedExperts):
        if form is not None and form.kind == "gated" and set(shapes) == set(twin.projections):
            sparse = _sparse(twin, original, path, shapes, form.shapes)
            sparse.stand_for(original, form)
            return sparse
    if form is None or set(shapes) != set(form.shapes):
        raise UnsupportedModelError(f"'{path}' ({type(original).__name__}) has no packed form with {sorted(shapes)}")
    _require_shapes(path, shapes, form.shapes)
    module = _packed_experts(original, form)
    module.stand_for(original, form)
    return module


def _packed_experts(original: Any, form: ExpertsForm) -> PackedExperts | PackedOwnExperts | PackedExpertProducts:
    """Return the packed counterpart of an experts module of a given form."""
    if form.kind == "product":
        return PackedExpertProducts(form.shapes)
    if form.kind == "own":
        return PackedOwnExperts(form.shapes, original)
    activation = original.mlp.activation_fn if hasattr(original, "mlp") else original.act_fn
    return _TWINS[form.kind](form.shapes, activation)


_TWINS: Mapping[str, type[PackedExperts]] = {
    "gated": PackedExperts,
    "plain": PackedPlainExperts,
    "every": PackedEveryExperts,
    "identity": PackedIdentityExperts,
}


def _sparse(
    twin: type[SparseExperts], original: Any, path: str, shapes: Shapes, stock: Mapping[str, tuple[int, int, int]]
) -> SparseExperts:
    """Return the packed counterpart of gated experts with gate and down stored by channels."""
    if not is_silu(original.act_fn):
        raise UnsupportedModelError(f"'{path}' has an activation other than SiLU, which packed channels need")
    experts, rows, columns = stock["up_proj"]
    records = experts, rows, 2 * columns
    expected = {name: stock.get(name, records) for name in twin.projections}
    _require_shapes(path, shapes, expected)
    return twin(expected, original.act_fn)


def _require_shapes(path: str, shapes: Shapes, expected: Mapping[str, tuple[int, ...]]) -> None:
    if shapes != dict(expected):
        raise LoadError(f"the directory packs '{path}' as {shapes}, but the model's configuration has {dict(expected)}")


def _packed_linear(original: nn.Module, path: str, shape: tuple[int, ...]) -> PackedLinear:
    """Return the packed counterpart of a linear layer, with its bias."""
    if not isinstance(original, nn.Linear):
        raise UnsupportedModelError(
            f"'{path}' is packed as a linear layer, but the model has a {type(original).__name__}"
        )
    expected = original.out_features, original.in_features
    if shape != expected:
        raise LoadError(f"the directory packs '{path}' as {shape}, but the model's configuration has {expected}")
    return PackedLinear(*expected, original.bias)


def _packed_embedding(original: nn.Module, path: str, shape: tuple[int, ...]) -> PackedEmbedding:
    """Return the packed counterpart of an embedding."""
    if type(original) is not nn.Embedding or original.max_norm is not None:
        raise UnsupportedModelError(f"'{path}' ({type(original).__name__}) does more than look up rows")
    expected = original.num_embeddings, original.embedding_dim
    if shape != expected:
        raise LoadError(f"the directory packs '{path}' as {shape}, but the model's configuration has {expected}")
    return PackedEmbedding(*expected, original.weight.dtype)


def _switch_layout(original: nn.ModuleDict) -> tuple[ExpertShapes, Any]:
    """Return the shapes and the activation of Switch Transformers experts."""
    first: Any = next(iter(original.values()))
    shapes = {name: (len(original), *getattr(first, name).weight.shape) for name in PackedSwitchExperts.projections}
    return shapes, first.act
