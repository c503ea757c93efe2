"""Reading packed directories through transformers: `AutoModelForCausalLM.from_pretrained(directory)`.

A packed directory names the quantization method `moepack` in its config. Transformers then builds the model on the
meta device, hands it to `MoepackQuantizer`, loads the weights, and hands it over again. Before the weights come, every
packed module (experts, a linear layer, the embedding) is replaced by one that has no parameters for what is packed, so
that transformers finds nothing to load, convert, cast or initialize there and never touches a packed byte; the packed
tensors, which no parameter asks for, are declared as expected leftovers. After the weights came, the mapped bytes are
attached. So the loader's renaming and conversion rules, which differ between versions, cannot interfere, and loading
adds no anonymous memory for what is packed.

Transformers without moepack must fail on such a directory rather than make up random experts: each layer has a packed
tensor under a name that the stock model has with another shape (`experts.down_proj`, the first expert of Switch, or the
`weight` of a linear layer).
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

from moepack.checkpoint.experts import ExpertsForm, form_of
from moepack.errors import CorruptionError, LoadError, UnsupportedModelError
from moepack.format.directory import check_listed
from moepack.format.plausible import SMALL
from moepack.integrations.decoding import decode_model
from moepack.integrations.placement import Placement, has_gpu, reserve
from moepack.integrations.saving import Saver
from moepack.runtime.backends import is_silu
from moepack.runtime.carried import carried_of
from moepack.runtime.decoder import install as install_decoder
from moepack.runtime.device import DeviceStore
from moepack.runtime.embedding import PackedEmbedding
from moepack.runtime.experts import (
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
from moepack.runtime.linear import PackedLinear
from moepack.runtime.store import MappedStore
from moepack.runtime.vocabulary import watch

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
"""The one projection of a packed linear layer, or of a packed embedding."""


class MoepackConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The `quantization_config` of a packed directory.

    Args:
        version: version of the directory's format.
        packed: for each experts module (its path in the model), the shape (E, R, C) of each packed projection; for each
            packed linear layer or embedding {"weight": (R, C)}.
        **settings: what the method that packed the directory notes for the reader (method, code and so on).

    Raises:
        LoadError: the directory is newer than this moepack.
        CorruptionError: the entries are not what the format says.
    """

    def __init__(self, version: int = 0, packed: Mapping[str, Any] | None = None, **settings: Any) -> None:
        if type(version) is not int or version < 1:
            raise CorruptionError(f"quantization_config names no format version: {version!r}", file="config.json")
        if version > SUPPORTED_VERSION:
            raise LoadError(
                f"the directory has format version {version}, this moepack reads up to {SUPPORTED_VERSION}: "
                "upgrade moepack (pip install --upgrade moepack)",
                file="config.json",
            )
        settings["quant_method"] = METHOD
        self.__dict__.update(settings)
        self.version = version
        self.packed = _checked_packed(packed)


def _checked_packed(packed: Any) -> dict[str, dict[str, list[int]]]:
    """The mapping from module to projection to shape, refused unless it is exactly that."""
    if not isinstance(packed, Mapping):
        raise CorruptionError("quantization_config lists no packed modules", file="config.json")
    for module, shapes in packed.items():
        if not isinstance(shapes, Mapping) or not _are_shapes(shapes):
            raise CorruptionError(f"quantization_config: bad packed shapes of '{module}'", file="config.json")
    return {module: {name: list(shape) for name, shape in shapes.items()} for module, shapes in packed.items()}


def _are_shapes(shapes: Mapping[str, Any]) -> bool:
    """Whether a module's entry is [rows, columns] of a linear layer, or [experts, rows, columns] of projections."""
    rank = 2 if set(shapes) == {LINEAR} else 3
    return all(_is_shape(shape, rank) for shape in shapes.values())


def _is_shape(shape: Any, rank: int) -> bool:
    sizes = shape if isinstance(shape, list | tuple) else ()
    return len(sizes) == rank and all(type(size) is int and size >= 0 for size in sizes)


class MoepackQuantizer(HfQuantizer):  # type: ignore[misc]
    """Puts packed experts into a model that transformers loads; see the module's text for how."""

    requires_calibration = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._placement = Placement({})
        self._model: Any = None
        self._modules: dict[str, Replacement] = {}
        self._paths: dict[str, str] = {}
        self._tied: dict[str, str] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse devices that packed weights do not run on. Transformers asks again once it has made an automatic map.

        Raises:
            LoadError: the device map names one.
            DeviceMemoryError: a GPU has too little memory for its part of the model.
        """
        device_map = kwargs.get("device_map")
        if isinstance(device_map, dict):
            self._placement = Placement(device_map)
            self._settle()

    def update_device_map(self, device_map: Any) -> Any:
        """Turn the automatic maps ("auto", "balanced" and so on) into the CPU where there is no GPU."""
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
        """Replace heads that are tied to a packed embedding: they multiply by its bytes, so nothing is left to tie."""
        tied, embedding = model.all_tied_weights_keys, self._modules[recorded]
        for weight in [target for target, source in tied.items() if source == f"{self._paths[recorded]}.weight"]:
            path = weight.removesuffix(".weight")
            head = _packed_linear(model.get_submodule(path), path, embedding.shapes["packed"][1:])
            model.set_submodule(path, head)
            _mark_initialized(model, path)
            self._modules[path], self._paths[path], self._tied[path] = head, path, recorded
            del tied[weight]

    def _settle(self) -> None:
        """Act on the devices of all layers, once they and the layers are known."""
        if self._model is not None:
            self._placement.settle({self._paths[recorded]: module for recorded, module in self._modules.items()})
            self._placement.check_memory(self._model)

    def _names(self, recorded: str, module: Replacement) -> Iterator[tuple[str, str]]:
        """The projections of a packed module with the names of their tensors.

        Raises:
            CorruptionError: the manifest lacks one.
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
        _cast_renamed(model, self._dtypes)
        install_decoder(model)
        watch(model)
        carried_of(model)
        model.save_pretrained = Saver(directory.path, model)
        del self._directory, self._modules, self._paths, self._tied, self._dtypes, self._model
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | None = None) -> Any:
        """Decode the packed weights of a loaded model, in its place; errors as for `decode_model`."""
        decode_model(model, dtype or model.dtype)
        return model

    def is_serializable(self) -> bool:
        """True: `save_pretrained` of a loaded model is a `Saver`."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: gradients pass through packed weights to adapters (`moepack.integrations.lora`)."""
        return True


def install() -> None:
    """Register the configuration and the quantizer; again is a no-op, and a reloaded moepack replaces the old one."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = MoepackConfig
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = MoepackQuantizer


def _open_directory(path: Path, model: Any) -> Any:
    """Open the packed directory; a snapshot of the hub gets its manifest first, which transformers does not fetch."""
    from moepack.format import PackedDirectory

    if not (path / "moepack.json").exists() and not Path(model.config.name_or_path).is_dir():
        from transformers.utils import cached_file

        commit = getattr(model.config, "_commit_hash", None)
        try:
            cached_file(model.config.name_or_path, "moepack.json", revision=commit, _commit_hash=commit)
        except OSError as error:
            raise LoadError(
                f"the manifest is needed and cannot be fetched: {error}", file=path / "moepack.json"
            ) from error
    return PackedDirectory.open(path)


def _refuse_oversized(model: Any, directory: Any) -> None:
    """Refuse a model that is much larger than its files: transformers would allocate what they lack.

    Raises:
        LoadError: the parameters that are not packed are more than twice the values that the directory holds for them.
    """
    stored = sum(math.prod(record.shape) for record in directory.manifest.tensors.values() if not record.packed)
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    wanted = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in tied)
    if wanted > 2 * stored + SMALL:
        message = f"makes a model of {wanted} values outside the packed modules, the files hold {stored}"
        raise LoadError(message, file=directory.path / "config.json")


def _module_path(model: Any, recorded: str) -> str:
    """The path in this model of a packed module, whose recorded path is that in the model with its head.

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
        "directory lists as packed; another version of transformers may have it (5.20 and newer are known to)"
    )


def _mark_initialized(model: Any, path: str) -> None:
    """Keep transformers from initializing the packed module, and its parent, whose rule reaches into it."""
    parent, _, _ = path.rpartition(".")
    model.get_submodule(path)._is_hf_initialized = True
    if "." in parent:  # that of embedding and head is the whole model
        model.get_submodule(parent)._is_hf_initialized = True


def _cast_renamed(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give parameters the dtype that was asked for where the loader did not.

    Up to 5.20, transformers leaves a parameter of a quantized model in the checkpoint's dtype if its name on disk is
    another one, such as Mixtral's router. Parameters that a model keeps in float32 on purpose are left as they came.
    """
    kept = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    for name, parameter in model.named_parameters():
        wanted = dtypes.get(name, parameter.dtype)
        if parameter.dtype != wanted and parameter.is_floating_point() and not kept & set(name.split(".")):
            parameter.data = parameter.data.to(wanted)


def _packed_module(original: Any, path: str, shapes: Shapes) -> Replacement:
    """The packed twin of an experts module, a linear layer or an embedding.

    Raises:
        LoadError: the directory's shapes are not those of the model's configuration.
        UnsupportedModelError: the module computes something that packed experts do not.
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
        raise UnsupportedModelError(f"'{path}' ({type(original).__name__}) has no packed twin for {sorted(shapes)}")
    _require_shapes(path, shapes, form.shapes)
    module = _packed_experts(original, form)
    module.stand_for(original, form)
    return module


def _packed_experts(original: Any, form: ExpertsForm) -> PackedExperts | PackedOwnExperts | PackedExpertProducts:
    """The packed twin of an experts module, by what calls it and how."""
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
    """The packed twin of gated experts whose gate and down projection are kept by channels."""
    if not is_silu(original.act_fn):
        raise UnsupportedModelError(f"'{path}' has another activation than SiLU, which packed channels need")
    experts, rows, columns = stock["up_proj"]
    records = experts, rows, 2 * columns
    expected = {name: stock.get(name, records) for name in twin.projections}
    _require_shapes(path, shapes, expected)
    return twin(expected, original.act_fn)


def _require_shapes(path: str, shapes: Shapes, expected: Mapping[str, tuple[int, ...]]) -> None:
    if shapes != dict(expected):
        raise LoadError(f"the directory packs '{path}' as {shapes}, the model's configuration says {dict(expected)}")


def _packed_linear(original: nn.Module, path: str, shape: tuple[int, ...]) -> PackedLinear:
    """The packed twin of a linear layer, with its bias."""
    if not isinstance(original, nn.Linear):
        raise UnsupportedModelError(f"'{path}' is packed as a linear layer, the model has a {type(original).__name__}")
    expected = original.out_features, original.in_features
    if shape != expected:
        raise LoadError(f"the directory packs '{path}' as {shape}, the model's configuration says {expected}")
    return PackedLinear(*expected, original.bias)


def _packed_embedding(original: nn.Module, path: str, shape: tuple[int, ...]) -> PackedEmbedding:
    """The packed twin of an embedding."""
    if type(original) is not nn.Embedding or original.max_norm is not None:
        raise UnsupportedModelError(f"'{path}' ({type(original).__name__}) does more than look up rows")
    expected = original.num_embeddings, original.embedding_dim
    if shape != expected:
        raise LoadError(f"the directory packs '{path}' as {shape}, the model's configuration says {expected}")
    return PackedEmbedding(*expected, original.weight.dtype)


def _switch_layout(original: nn.ModuleDict) -> tuple[ExpertShapes, Any]:
    """Shapes and activation of the experts of Switch Transformers."""
    first: Any = next(iter(original.values()))
    shapes = {name: (len(original), *getattr(first, name).weight.shape) for name in PackedSwitchExperts.projections}
    return shapes, first.act
