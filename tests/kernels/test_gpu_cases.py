"""The cases of compute-sanitizer and of a process on cuda:1, without a GPU: what they call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu import sanitizer_cases, second_device
from samples import COMPILED_OPS as OPS
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

MODULES = {path.stem for path in (Path(__file__).parents[2] / "kernels_cu").rglob("*.cu")}


class _WithoutValues(TorchFunctionMode):
    """Tensors of shape and dtype alone, wherever they would be."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cuda:
            return args[0].to("meta")
        kwargs = dict(kwargs or {})
        if func in _MAKE:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


_MAKE = {torch.randn, torch.rand, torch.randint, torch.ones, torch.full, torch.empty, torch.tensor}


class _Function:
    """A function of a module: returns what its op describes, and notes that it was called."""

    def __init__(self, module: str, name: str, called: set[tuple[str, str]]) -> None:
        ops = [op for op in OPS.values() if (op.module, op.function) == (module, name)]
        assert ops, f"no op calls {name} of {module}"
        self._op, self._called = ops[0], called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        results = self._op.plan(*args, **kwargs).results
        self._called.add((self._op.module, self._op.function))
        made = [torch.empty(result.shape, dtype=result.dtype) for result in results]
        return made[0] if len(made) == 1 else tuple(made)

    def out(self, *args: Any, **kwargs: Any) -> None:
        self(*args, **{k: v for k, v in kwargs.items() if k not in self._op.results})


class _Module(SimpleNamespace):
    def __init__(self, name: str, called: set[tuple[str, str]]) -> None:
        super().__init__(_name=name, _called=called)

    def __getattr__(self, name: str) -> _Function:
        return _Function(self._name, name, self._called)


@pytest.fixture(scope="module")
def called() -> set[tuple[str, str]]:
    """Module and name of each function that the cases call."""
    found: set[tuple[str, str]] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sanitizer_cases, "get_cuda_module", lambda name, _: _Module(name, found))
        patch.setattr(torch.cuda, "synchronize", lambda: None)
        with _WithoutValues():
            sanitizer_cases.main()
    return found


def test_the_sanitizer_sees_every_module(called: set[tuple[str, str]]) -> None:
    assert MODULES - {module for module, _ in called} == set()


def test_the_sanitizer_sees_every_function(called: set[tuple[str, str]]) -> None:
    assert {(op.module, op.function) for op in OPS.values()} - called == set()


class _Noted(TorchDispatchMode):
    """Notes which of the project's ops are called."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "jitquant":
            self.ops.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


def test_a_process_on_another_gpu_calls_every_module() -> None:
    """That it calls every public function is tested in tests/ops/test_public.py."""
    with _Noted() as noted:
        for call in second_device.CASES.values():
            call(torch.clone)
    assert MODULES - {op.module for name, op in OPS.items() if name in noted.ops} == set()
