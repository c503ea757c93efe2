"""`save_pretrained` of a packed model: copies the directory that the model was loaded from.

Packed bytes are not parameters, and the files on disk are what runs, so nothing is packed again. Shards are hard-linked
if the file system supports it; all other files are copied. Changes to the loaded model are not saved.
"""

import os
import shutil
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from moepack.errors import OutputExistsError, SerializationError
from moepack.format.atomic import TEMPORARY, disk_errors
from moepack.format.directory import check_size, read_manifest
from moepack.format.manifest import MANIFEST, Manifest
from moepack.format.side import is_editable, may_hold_weights, side_names
from moepack.system import files

__all__ = ["Saver"]


class Saver:
    """Implements `save_pretrained` for a model loaded from `directory`.

    It is pickled and copied with its model. If transformers has added adapters to the model (`load_adapter`), it saves
    only those, as transformers does for any model.
    """

    def __init__(self, directory: Path, model: Any) -> None:
        self._directory = directory
        self._model = weakref.ref(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Saver":
        model = self._model()
        return type(self)(self._directory, memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._directory, self._model())

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
        if push_to_hub:
            _upload(target, options)

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
