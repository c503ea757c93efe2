"""Plugs moepack into transformers and peft.

After `register()`, `AutoModel...from_pretrained` reads packed directories and peft adapts the loaded models.
`import moepack` calls it. It costs nothing until transformers or peft is used: registration with a module that is not
imported yet waits for its import.

Programs that do not import moepack, such as `lm_eval --model hf`, can also read packed directories. transformers has no
plugin mechanism, but `import torch` calls the entry points in the group `torch.backends`, and `register` is one of
them. TORCH_DEVICE_BACKEND_AUTOLOAD=0 disables torch's plugins.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["register"]

_PLUGINS = {
    "transformers.quantizers.auto": ("moepack.integrations.transformers", "install"),
    "peft.tuners.tuners_utils": ("moepack.integrations.peft", "install"),
    "peft.peft_model": ("moepack.integrations.peft", "install_prompts"),
}
"""Maps a module of another library to our module and the function in it that registers."""


def register() -> None:
    """Register with transformers and peft: now for imported modules, at import for the others."""
    for target in _PLUGINS:
        if target in sys.modules and not _is_importing(target):
            _install(target)
        elif not any(isinstance(finder, _AfterImport) and finder.target == target for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(target))


def _is_importing(target: str) -> bool:
    """Return whether a module is being imported. It may be importing torch, which calls `register`."""
    return getattr(getattr(sys.modules.get(target), "__spec__", None), "_initializing", False)


def _install(target: str) -> None:
    module, function = _PLUGINS[target]
    if _is_importing(module):  # our module was imported first, and imports the target: see `_AfterImport`
        return
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not (isinstance(finder, _AfterImport) and finder.target == target)
    ]
    getattr(import_module(module), function)()


class _AfterImport(MetaPathFinder):
    """Delegates to the other finders and appends the registration to the loader that they find.

    If the target or our module is already being imported, it waits for the next imported module of the same library.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._library = target.partition(".")[0] + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the awaited module, with a loader that registers; None for any other module."""
        if fullname != self.target and not (self.target in sys.modules and fullname.startswith(self._library)):
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.target)
        return spec


class _Then(Loader):
    """A loader that registers with `target` after executing a module."""

    def __init__(self, loader: Loader, target: str) -> None:
        self.loader, self.target = loader, target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Delegate to the wrapped loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with the wrapped loader, restore that loader on the module, then register."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if module.__name__ == self.target or not _is_importing(self.target):
            _install(self.target)
