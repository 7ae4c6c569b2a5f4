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

REQUIRED: Any = object()
"""In place of a parameter's default, if it has none."""


def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """The parameters of a function, each with its default or REQUIRED."""
    code = function.__code__  # inspect.signature would be a tenth of the time of an import
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    defaults = function.__defaults__ or ()
    found = dict.fromkeys(names, REQUIRED)
    found.update(zip(names[code.co_argcount - len(defaults) :], defaults, strict=False))
    return found | (function.__kwdefaults__ or {})


def arguments_of(function: Callable[..., Any]) -> str:
    """The arguments of a function as schema text, from annotations that are text."""
    fragments = []
    for name, default in parameters(function).items():
        kind = function.__annotations__[name].replace("torch.dtype", "ScalarType")
        fragment = f"{kind.removeprefix('torch.').replace(' | None', '?')} {name}"
        if default is not REQUIRED:
            fragment += f'="{default}"' if isinstance(default, str) else f"={default}"
        fragments.append(fragment)
    if function.__code__.co_kwonlyargcount:
        fragments.insert(function.__code__.co_argcount, "*")
    return ", ".join(fragments)


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


def define(schema: str, *, cpu: Any, cuda: Any, meta: Any, tags: Sequence[torch.Tag] = ()) -> None:
    """Defines an op, or an overload of one, with its implementations.

    In place of a fake one it has a kernel for meta tensors, which is registered in a tenth of the
    time and sees all but devices. Torch refuses mixed ones while it traces, and the op in the run.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    LIBRARY.impl(name, meta, "Meta")
