"""A part of a module, which a first call is built for, has every kernel that its calls need."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from samples import COMPILED_OPS as OPS
from samples import SAMPLES, Sample
from samples_experts import experts_in_tiles

from jitquant.ops.parts import Part
from jitquant.ops.schema import Compiled

from .emulated import Machine
from .test_emulated import HOPPER, _check, _Operator


class _On:
    """The machines of all parts, which run on one device."""

    def __init__(self, device: int) -> None:
        self.device = device

    def use(self, device: int, *, descending: bool) -> None:
        assert (device, descending) == (self.device, False)


QUICK = {"dequantize_mxfp4"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, op in sorted(OPS.items())
        if op._part is not None
    ],
)
def test_every_sample_by_its_part(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op = OPS[name]
    samples: dict[Part, list[Sample]] = defaultdict(list)
    for sample in (*SAMPLES[name], *(s for s in experts_in_tiles() if s.op == name)):
        args, kwargs = sample.make("cpu")
        part = op.part(op._named(args, kwargs))
        if part is not None:  # else the call needs the whole module
            samples[part].append(sample)
    assert len(samples) > 1
    assert len({part.name for part in samples}) == len(samples)
    # Parts of another dtype come from the same sources, and take as long to compile.
    of_one = {p: of for p, of in samples.items() if not p.name.startswith(("fp16", "fp32"))}
    if len(of_one) > 1:
        samples = of_one
    # The ways of the products that have parts of their own are Hopper's.
    device = HOPPER if op.module in ("nvfp4_linear", "nvfp4_experts") else 0
    used: set[str] = set()

    def compile_part(part: Part | None) -> Compiled:
        name, flags = ("whole", ()) if part is None else (part.name, part.flags)
        folder = tmp_path / name
        folder.mkdir()
        machine = Machine([op.module], folder, flags=flags)
        machine.use(device)

        class Called(_Operator):
            def out(self, *args: Any, **kwargs: Any) -> None:
                super().out(*args, **kwargs)
                used.add(name)

        return Compiled(Called(machine, op), lambda *_: NotImplemented, lambda: True, part)

    monkeypatch.setattr(op, "_compile", compile_part)
    monkeypatch.setattr(op, "_kept", None)
    monkeypatch.setattr(op, "_others", {})
    for part, group in samples.items():
        for sample in group:
            # A wider part does what this one lacks, as for memory that is not aligned.
            monkeypatch.setattr(op, "_lacking", set())
            _check(_On(device), sample, [(device, False)])
        assert part.name in used
