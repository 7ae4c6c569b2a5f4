"""The object that represents a loaded library."""

from __future__ import annotations

import contextlib
import ctypes
import difflib
import importlib.machinery
import importlib.util
from collections.abc import Collection, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from .errors import LoaderError


class CudaModule(ModuleType):
    """A compiled module; its attributes are its functions.

    Operators registered through TORCH_LIBRARY or STABLE_TORCH_LIBRARY appear as the packets of
    ``torch.ops`` (so ``module.f.default`` and ``module.f.out`` work); the attributes of a
    PYBIND11_MODULE appear as they are.

    Attributes:
        key: the final cache key (hexadecimal).
        archs: canonical names of the architectures it holds code for.
        path: the shared library.
        extension_name: the value that TORCH_EXTENSION_NAME had.
    """

    def __init__(
        self,
        name: str,
        *,
        extension_name: str,
        key: str,
        archs: Iterable[str],
        path: Path,
        functions: dict[str, Any],
        library: ctypes.CDLL,
    ) -> None:
        super().__init__(name, f"Functions of the compiled module {name!r}.")
        self.extension_name = extension_name
        self.key = key
        self.archs = tuple(archs)
        self.path = path
        self.library = library
        self._functions = tuple(sorted(functions))
        self.__file__ = str(path)
        self.__dict__.update(functions)

    def __getattr__(self, attribute: str) -> Any:
        names = self.__dict__.get("_functions", ())
        raise no_attribute(f"compiled module {self.__name__!r}", attribute, names)

    def __dir__(self) -> list[str]:
        return [*self._functions, "archs", "extension_name", "key", "library", "path"]

    def __repr__(self) -> str:
        archs = ", ".join(f"sm_{arch}" for arch in self.archs) or "host only"
        return f"<CudaModule {self.__name__!r} ({archs}) key {self.key[:12]} from {self.path}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"compiled module {self.__name__!r} cannot be pickled; call get_cuda_module in the "
            "process that needs it (it is a hit there)."
        )


def no_attribute(module: str, attribute: str, names: Collection[str]) -> AttributeError:
    """The error for an attribute that a module does not have, which has functions ``names``."""
    if attribute.startswith("__"):
        return AttributeError(attribute)
    near = difflib.get_close_matches(attribute, names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    has = ", ".join(names) or "no functions (it registers none)"
    return AttributeError(f"{module} has no attribute {attribute!r}.{hint} It has: {has}.")


def import_extension(name: str, library: str) -> ModuleType:
    """Import ``library`` as the Python extension module ``name``, leaving ``sys.modules`` alone."""
    loader = importlib.machinery.ExtensionFileLoader(name, library)
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    if spec is None:
        raise LoaderError(f"{library} cannot be imported as {name!r}.")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


#: The libraries that this process has loaded, as the dynamic linker knows them: by their file
#: names, each of which is unique to its build.
_LOADED: dict[str, tuple[Path, ctypes.CDLL]] = {}


def is_loaded(file_name: str) -> bool:
    """Whether this process has a library of this name, maybe from a copy of the cache."""
    return file_name in _LOADED


def load_module(
    name: str,
    *,
    extension_name: str,
    key: str,
    archs: Iterable[str],
    path: Path,
    opened: str,
    ops: Iterable[str],
    init_symbols: Iterable[str],
) -> CudaModule:
    """Load a library, unless this process has it, and collect its functions.

    What is loaded is ``opened``, a path to the open file whose digest was checked; ``path`` says
    where it came from. Registering its operators again, from a copy, would end the process.
    ``ops`` are the operators it registers (``namespace::name`` or ``namespace::name.overload``).

    Raises:
        LoaderError: the dynamic linker or the extension's own initialization refuses.
    """
    import torch

    functions: dict[str, Any] = {}
    try:
        if path.name not in _LOADED:
            # The linker compares names first: if somebody has closed the descriptor of an earlier
            # library, this one may have its number, and needs another name.
            while any(opened == library._name for _, library in _LOADED.values()):
                opened = opened.replace("/fd/", "/fd/./")
            _LOADED[path.name] = path, ctypes.CDLL(opened)
            torch.ops.loaded_libraries.add(str(path))
        path, library = _LOADED[path.name]
        for symbol in init_symbols:
            extension = import_extension(symbol, library._name)
            functions.update((k, v) for k, v in vars(extension).items() if not k.startswith("__"))
    except (OSError, ImportError) as error:
        raise LoaderError(
            f"module {name!r}: {path} does not load: {str(error).replace(opened, path.name)}"
        ) from error
    # Names of the module's own namespace last, so that they win over those of a fixed one.
    for op in sorted(ops, key=lambda o: o.startswith(f"{extension_name}::")):
        namespace, _, rest = op.partition("::")
        function = rest.partition(".")[0]
        # An implementation of an operator that nobody has declared has no packet.
        with contextlib.suppress(AttributeError):
            functions[function] = getattr(getattr(torch.ops, namespace), function)
    return CudaModule(
        name,
        extension_name=extension_name,
        key=key,
        archs=archs,
        path=path,
        functions=functions,
        library=library,
    )
