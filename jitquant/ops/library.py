"""``torch.ops.jitquant``: the text of schemas, and how an op is defined there.

Ops have no derivative: no result requires grad, even if inputs do. PyTorch's default for an op
without one would give its results a grad_fn that warns in backward.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

LIBRARY: Any = torch.library.Library("jitquant", "DEF")  # type: ignore[no-untyped-call]


def arguments_of(function: Callable[..., Any]) -> str:
    """The arguments of a function with annotations, as schema text."""
    schema: str = torch.library.infer_schema(function, mutates_args=())
    return schema[1 : schema.rindex(") -> ")].replace("SymInt", "int")


def schemas(name: str, arguments: str, results: Sequence[str]) -> tuple[str, str]:
    """Schema text of the functional overload and of ``out``.

    Sizes may be symbolic: a compiled graph is for one value of an argument that is a plain int.
    """
    arguments = re.sub(r"\bint\b", "SymInt", arguments)
    pairs = zip("abcdefgh"[arguments.count("!") :], results, strict=False)
    buffers = ", ".join(f"Tensor({letter}!) {result}" for letter, result in pairs)
    comma = ", " if "*" in arguments else ", *, "
    several = ", ".join(f"Tensor {result}" for result in results)
    returned = f"({several})" if len(results) > 1 else "Tensor"
    return (
        f"{name}({arguments}) -> {returned}",
        f"{name}.out({arguments}{comma}{buffers}) -> ()",
    )


def define(schema: str, *, cpu: Any, cuda: Any, fake: Any, tags: Sequence[torch.Tag] = ()) -> None:
    """Defines an op, or an overload of one, with its implementations.

    One without results needs no fake ones: it has a kernel for meta tensors, which is registered in
    a tenth of the time and sees all but devices. These are checked in the run.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    if schema.endswith(" -> ()"):
        LIBRARY.impl(name, fake, "Meta")
    else:
        torch.library.register_fake(f"jitquant::{name}", fake, lib=LIBRARY)
