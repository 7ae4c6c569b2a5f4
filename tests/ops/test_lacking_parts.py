"""A part that lacks the kernels for a call gives way to a wider one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jitquant.ops.linear import LINEAR
from jitquant.ops.parts import Part
from jitquant.ops.schema import Compiled

LACKS = "nvfp4_linear: CUDA error cudaErrorInvalidDeviceFunction: invalid device function"


class _Library:
    """Compiled parts, of which those in ``failing`` refuse each call with a message."""

    def __init__(self, failing: dict[str, str]) -> None:
        self.failing = failing
        self.built: list[str] = []

    def compile(self, part: Part | None) -> Compiled:
        name = "whole" if part is None else part.name
        self.built.append(name)

        def call(*_: Any, **__: Any) -> tuple[str]:
            if name in self.failing:
                raise RuntimeError(self.failing[name])
            return (name,)

        class Operator:
            default = staticmethod(call)

        return Compiled(Operator(), call, lambda: True, part)


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(LINEAR, "_kept", None)
    monkeypatch.setattr(LINEAR, "_others", {})
    monkeypatch.setattr(LINEAR, "_lacking", set())
    given = dict.fromkeys(LINEAR.names)
    given["x"] = torch.empty(1, 256, dtype=torch.bfloat16)
    given["w_fp4"] = torch.empty(16, 128, dtype=torch.uint8)
    return given


def test_a_wider_part_is_built_and_kept(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library({"bf16_2_rows_aligned": LACKS})
    monkeypatch.setattr(LINEAR, "_compile", library.compile)
    assert LINEAR._run("default", arguments) == ("bf16_2_rows",)
    assert library.built == ["bf16_2_rows_aligned", "bf16_2_rows"]
    assert LINEAR.direct(arguments) == ("bf16_2_rows",)
    assert LINEAR._run("default", arguments) == ("bf16_2_rows",)
    assert len(library.built) == 2


@pytest.mark.parametrize("by_keyword", [False, True])
def test_past_the_dispatcher(
    by_keyword: bool, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library({})
    monkeypatch.setattr(LINEAR, "_compile", library.compile)
    LINEAR._run("default", arguments)
    library.failing["bf16_2_rows_aligned"] = LACKS
    # `dispatched` builds the wider one.
    if by_keyword:
        assert LINEAR.into(None, **arguments) == arguments
    else:
        assert LINEAR.direct(arguments) is NotImplemented
    assert LINEAR._run("default", arguments) == ("bf16_2_rows",)
    assert LINEAR.into(None, **arguments) == ("bf16_2_rows",)


def test_the_whole_module_lacks_nothing(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("bf16_2_rows_aligned", "bf16_2_rows", "bf16_16_rows", "whole")
    library = _Library(dict.fromkeys(names, LACKS))
    monkeypatch.setattr(LINEAR, "_compile", library.compile)
    with pytest.raises(RuntimeError, match="invalid device function"):
        LINEAR._run("default", arguments)
    assert tuple(library.built) == names


def test_other_errors_are_the_callers(
    arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library({"bf16_2_rows_aligned": "CUDA error cudaErrorLaunchFailure"})
    monkeypatch.setattr(LINEAR, "_compile", library.compile)
    for call in (
        lambda: LINEAR._run("default", arguments),
        lambda: LINEAR.direct(arguments),
        lambda: LINEAR.into(None, **arguments),
    ):
        with pytest.raises(RuntimeError, match="cudaErrorLaunchFailure"):
            call()
    assert library.built == ["bf16_2_rows_aligned"]
