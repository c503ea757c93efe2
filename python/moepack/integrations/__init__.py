"""Where moepack plugs into other libraries.

`register()` makes `AutoModel...from_pretrained` read packed directories. It is called by `import moepack`, and costs
nothing until transformers is used: where transformers' quantizers are not imported yet, the registration waits for
their import.

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

_TARGET = "transformers.quantizers.auto"


def register() -> None:
    """Register moepack's quantizer with transformers, now or as soon as transformers' quantizers are imported."""
    if _TARGET in sys.modules and not _is_importing():
        _install()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _is_importing() -> bool:
    """Whether the import of transformers' quantizers has begun and not ended: they import torch, which calls here."""
    return getattr(getattr(sys.modules.get(_TARGET), "__spec__", None), "_initializing", False)


def _install() -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
    import_module("moepack.integrations.transformers").install()


class _AfterImport(MetaPathFinder):
    """Finds nothing by itself: lets the other finders find transformers' quantizers, and appends the registration.

    Where the quantizers are being imported already, it waits for the first module of transformers behind them.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for what is waited for."""
        if fullname != _TARGET and not (_TARGET in sys.modules and fullname.startswith("transformers.")):
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


class _Then(Loader):
    """A loader that registers moepack after the module has run."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the wrapped loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module by the wrapped loader, which is also what the module will know as its own; then register."""
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if module.__name__ == _TARGET or not _is_importing():
            _install()
