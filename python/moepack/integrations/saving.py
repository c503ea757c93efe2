"""`save_pretrained` of a packed model: copies the directory that the model was loaded from.

Packed bytes are not parameters, and the model runs the files on disk, so nothing is packed again. Shards are
hard-linked if the file system supports it; all other files are copied. A changed generation configuration is saved; a
warning names changed parameters, which are not.
"""

import json
import os
import shutil
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from moepack.errors import MoepackWarning, OutputExistsError, SerializationError
from moepack.format.atomic import TEMPORARY, disk_errors
from moepack.format.directory import check_size, read_manifest
from moepack.format.hub import GENERATION
from moepack.format.manifest import MANIFEST, Manifest
from moepack.format.side import is_editable, may_hold_weights, side_names
from moepack.system import files

__all__ = ["Saver"]


class Saver:
    """Implements `save_pretrained` for a model loaded from `directory`.

    It is pickled and copied with its model. If transformers has added adapters to the model (`load_adapter`), it saves
    only those, as transformers does for any model.
    """

    def __init__(self, directory: Path, model: Any, changed: Sequence[str] | None = None) -> None:
        """Record the model's parameters. A copy keeps the list of parameters that had `changed` when it was made."""
        self._directory = directory
        self._model = weakref.ref(model)
        self._changed = list(changed or ())
        self._loaded = _versions(model) if changed is None else None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Saver":
        model = self._model()
        return type(self)(self._directory, memo.get(id(model), model), self._changes())

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._directory, self._model(), self._changes())

    def __call__(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **options: Any) -> None:
        """Copy the packed directory. The manifest is written last, so an interrupted call leaves none.

        Args:
            save_directory: created if it does not exist. Files with the same names are replaced.
            push_to_hub: upload the directory afterwards to `repo_id` (default: the directory's name).
            **options: `repo_id`, `token`, `private`, `commit_message` and `create_pr` of the upload. Other options of
                transformers (`max_shard_size`, `state_dict`, ...) do not apply to packed shards and are ignored.

        Raises:
            SerializationError: a file of the source directory is missing.
            OutputExistsError: `save_directory` holds weights of another model.
            DiskError: the disk is full or not writable.

        Warns:
            MoepackWarning: the directory lacks changes of parameters, or is of another class of model.
        """
        model: Any = self._model()
        if getattr(model, "_hf_peft_config_loaded", False):
            type(model).save_pretrained(model, save_directory, push_to_hub=push_to_hub, **options)
            return
        target = Path(save_directory)
        with disk_errors(target):
            target.mkdir(parents=True, exist_ok=True)
            if not target.samefile(self._directory):
                self._write(target)
            if _generates_otherwise(model, self._directory):
                model.generation_config.save_pretrained(target)
        for lacking in self._lacking(model):
            warnings.warn(f"{target}: {lacking}", MoepackWarning, stacklevel=2)
        if push_to_hub:
            _upload(target, options)

    def _changes(self) -> list[str]:
        """The parameters that were written to or added since the model was loaded."""
        model = self._model()
        if self._loaded is None or model is None:
            return self._changed
        now = _versions(model)
        return [name for name, found in now.items() if name not in self._loaded or _written(self._loaded[name], found)]

    def _lacking(self, model: Any) -> Iterator[str]:
        """Describe what the directory lacks of the model."""
        if changes := self._changes():
            others = f" and of {len(changes) - 1} other parameters" if len(changes) > 1 else ""
            yield f"a packed directory is saved as it was loaded, without the changes of '{changes[0]}'{others}"
        file = self._directory / "config.json"
        stored = json.loads(file.read_bytes()).get("architectures") if file.is_file() else None
        if stored and model is not None and type(model).__name__ not in stored:
            yield f"holds the weights of {stored[0]}, not all of {type(model).__name__}"

    def _write(self, target: Path) -> None:
        manifest = read_manifest(self._directory)
        foreign = (entry for entry in target.iterdir() if may_hold_weights(entry.name))
        if stale := next((entry for entry in foreign if entry.name not in manifest.files), None):
            raise OutputExistsError("belongs to another model; choose another directory or remove the file", file=stale)
        for name in self._names(manifest):
            _put(self._directory / name, target / name, link=may_hold_weights(name))
        _put(self._directory / MANIFEST, target / MANIFEST, link=False)

    def _names(self, manifest: Manifest) -> Iterator[str]:
        """Yield the files of the manifest, then side files that were added later."""
        for name, record in manifest.files.items():
            file = self._directory / name
            if file.is_file():
                if not is_editable(name):
                    check_size(file, record.size)
                yield name
            elif not is_editable(name):
                raise SerializationError("was removed after the model was loaded; cannot save", file=file)
        for entry in sorted(self._directory.iterdir()):
            if not entry.name.startswith(".") or entry.is_file():
                added = (name for name in side_names(entry) if name not in manifest.files)
                yield from (name for name in added if name != MANIFEST)


_Version = tuple["weakref.ref[nn.Parameter]", int]


def _versions(model: nn.Module) -> dict[str, _Version]:
    """The parameters by name, each with the number of times that it was written to."""
    tracked = ((name, each) for name, each in model.named_parameters() if not each.is_inference())
    return {name: (weakref.ref(each), each._version) for name, each in tracked}


def _written(before: _Version, now: _Version) -> bool:
    """Whether a parameter was written to. Placing a model on devices replaces parameters, which counts as no change."""
    return before[0]() is now[0]() and before[1] != now[1]


def _generates_otherwise(model: Any, directory: Path) -> bool:
    """Whether the model's generation configuration differs from the stored one."""
    from transformers import GenerationConfig

    live = getattr(model, "generation_config", None)
    if live is None:
        return False
    stored = GenerationConfig.from_model_config(model.config)
    if (directory / GENERATION).is_file():
        try:
            stored = GenerationConfig.from_pretrained(directory)
        except (OSError, TypeError, ValueError):  # transformers has loaded the model without it
            return False
    ignored = {"transformers_version", "_from_model_config"}
    first, second = ({k: v for k, v in each.to_dict().items() if k not in ignored} for each in (live, stored))
    return first != second


def _put(source: Path, target: Path, link: bool) -> None:
    """Hard-link or copy a file. `target` appears atomically."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(TEMPORARY.format(name=target.name))
    files.remove(temporary, missing_ok=True)
    if link:
        if target.exists() and target.samefile(source):  # linked by an earlier call
            return
        with suppress(OSError):  # it exists, or the file system has no links
            files.link(source.resolve(), target)
            return
    if link and files.KEEPS_REMOVED:  # a link to a file in use cannot be renamed elsewhere
        with suppress(OSError):
            files.link(source.resolve(), temporary)
    try:
        if not temporary.exists():
            shutil.copyfile(source, temporary)
        files.replace(temporary, target)
    except OSError:
        with suppress(OSError):
            files.remove(temporary, missing_ok=True)
        raise


def _upload(directory: Path, options: dict[str, Any]) -> None:
    from huggingface_hub import HfApi

    api = HfApi(token=options.get("token"))
    name = options.get("repo_id", directory.absolute().name)
    repository = api.create_repo(name, private=options.get("private"), exist_ok=True).repo_id
    chosen = {key: options[key] for key in ("commit_message", "create_pr") if key in options}
    api.upload_folder(repo_id=repository, folder_path=directory, **chosen)
