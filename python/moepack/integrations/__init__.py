"""Where moepack plugs into other libraries.

`register()` makes `AutoModel...from_pretrained` read packed directories, and peft adapt the models that it gives. It is
called by `import moepack`, and costs nothing until transformers or peft is used: what is registered with a module
waits for its import, where it is not imported yet.

Programs that never heard of moepack, such as `lm_eval --model hf`, read packed directories as well, where it is
installed: transformers looks for no plugins, but torch calls the entry points `torch.backends` when it is imported, and
`register` is one of them. TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns torch's plugins off.
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
"""For each module of another library the module and the function of ours that register with it."""


def register() -> None:
    """Register with transformers and peft, now or as soon as the modules that are registered with are imported."""
    for target in _PLUGINS:
        if target in sys.modules and not _is_importing(target):
            _install(target)
        elif not any(isinstance(finder, _AfterImport) and finder.target == target for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(target))


def _is_importing(target: str) -> bool:
    """Whether the import of a module has begun and not ended: it may import torch, which calls here."""
    return getattr(getattr(sys.modules.get(target), "__spec__", None), "_initializing", False)


def _install(target: str) -> None:
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if not (isinstance(finder, _AfterImport) and finder.target == target)
    ]
    module, function = _PLUGINS[target]
    getattr(import_module(module), function)()


class _AfterImport(MetaPathFinder):
    """Finds nothing by itself: lets the other finders find a module, and appends the registration.

    Where the module is being imported already, it waits for the first module of the same library behind it.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self._library = target.partition(".")[0] + "."

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for what is waited for."""
        if fullname != self.target and not (self.target in sys.modules and fullname.startswith(self._library)):
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.target)
        return spec


class _Then(Loader):
    """A loader that registers with `target` after a module has run."""

    def __init__(self, loader: Loader, target: str) -> None:
        self.loader, self.target = loader, target

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the wrapped loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module by the wrapped loader, which is also what the module will know as its own; then register."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if module.__name__ == self.target or not _is_importing(self.target):
            _install(self.target)
