"""Import-only stand-in for torchvision on machines without a GPU.

PyPI's builds of torchvision are CUDA builds, whose import fails beside a CPU-only torch. SGLang's text path needs only the names:
every submodule exists, every attribute of it is a class that refuses to be called.
"""

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0.0+standin"
__path__: list[str] = []


class _Name:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("torchvision is a stand-in here: image models are not available")


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        modes = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
        value: Any = (
            enum.Enum(name, {mode: mode.lower() for mode in modes})
            if name == "InterpolationMode"
            else type(name, (_Name,), {})
        )
        setattr(self, name, value)
        return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            if fullname.startswith("torchvision.")
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
