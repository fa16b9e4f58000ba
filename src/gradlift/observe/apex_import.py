"""`gradlift run --apex`: an import finder that gives gradlift's modules for `apex`."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from typing import Any

_MODULES = ("amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel")
_INNER = {
    "amp": ("_amp_state",),
    "fp16_utils": ("fp16_optimizer", "fp16util", "loss_scaler"),
    "normalization": ("fused_layer_norm",),
    "parallel": ("LARC",),
}
_REFUSED = "apex.transformer"  # by the module itself, in words
_NAMES = {"apex", _REFUSED, *(f"apex.{name}" for name in _MODULES)}


def stand_in(quiet: bool) -> None:
    """From now on `import apex` gives gradlift's module; nothing is imported before that."""
    if not quiet and importlib.util.find_spec("apex") is not None:
        print("gradlift: --apex hides the apex that is installed here", file=sys.stderr)
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name in _NAMES:
            package = name == "apex" or name.partition(".")[2] in _INNER
            return importlib.machinery.ModuleSpec(name, self, is_package=package)
        if name.startswith("apex."):
            has = ", ".join(_MODULES)
            raise ModuleNotFoundError(
                f"No module named {name!r} (gradlift stands in for apex with {has})", name=name
            )
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = importlib.import_module(f"gradlift.{spec.name}")
        spec.loader_state = module.__spec__
        for name in _INNER.get(spec.name.partition(".")[2], ()):
            # not by an import, which would put it in the place of a class of the same name
            sys.modules[f"{spec.name}.{name}"] = importlib.import_module(
                f"{module.__name__}.{name}"
            )
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """The module was already executed, under its own name, which it keeps."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
