"""Which linears of a model are quantized: what is left alone by default, patterns, presets.

Everything here works on names and shapes, so that a model in memory and a folder of files are
treated alike.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

Shapes = Mapping[str, Sequence[int]]
"""The shape of each weight, by the name of its module."""

PRESETS: dict[str, tuple[str, ...]] = {
    "all": ("*",),
    "attention": (r"re:(.*\.)?(self_attn|self_attention|attn|attention|cross_attn)\.",),
    "mlp": (r"re:(.*\.)?(mlp|ffn|feed_forward|block_sparse_moe|moe)\.",),
    "experts": (r"re:(.*\.)?experts(\.|$)",),
}
"""The patterns of each preset of `targets`."""

FUSED_LAYERS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("gate", "up"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Layers of one module that engines fuse to one product, which has one global scale."""

_HEADS = ("lm_head", "embed_out")
_ROUTERS = ("router", "shared_expert_gate")
_PLAIN = ("eh_proj", "indexer.wk", "weights_proj")
"""Of DeepSeek's layer for the token after the next one, and of its indexer, whose two vLLM and
sglang multiply as one: they have no quantized ones."""
_READ = ("dt_proj",)  # by the mixers of Mamba and Jamba, which multiply by its weight themselves


def as_patterns(argument: str, given: object) -> tuple[str, ...]:
    """Patterns that a caller gave as one string or as several.

    Raises:
        TypeError: they are not strings.
        ValueError: one that begins with ``re:`` is not a regular expression.
    """
    patterns = (given,) if isinstance(given, str) else given
    if not isinstance(patterns, Collection) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f"{argument}: expected a name or a pattern, or several, got {given!r}. Examples: "
            "'lm_head', 'model.layers.0.*', 're:' with a regular expression"
        )
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ValueError(
                    f"{argument}: expected a regular expression after 're:', got {pattern!r}: "
                    f"{error}"
                ) from error
    return tuple(patterns)


def as_families(given: Any) -> tuple[tuple[str, ...], ...]:
    """Names of layers that engines fuse, several for each product.

    Raises:
        TypeError: they are something else, such as one family outside of a list.
    """
    is_list = isinstance(given, Collection) and not isinstance(given, str)
    families = given if is_list else (given,)
    for family in families:
        is_several = isinstance(family, Collection) and not isinstance(family, str)
        if not is_several or not all(isinstance(member, str) for member in family):
            raise TypeError(
                "fused_layers: expected a list of tuples of names, such as "
                f"[('q_proj', 'k_proj', 'v_proj')], got {given!r}. Pass () to fuse no layers"
            )
    return tuple(tuple(family) for family in families)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern means a module.

    Args:
        name: of the module.
        patterns: a full name or its last part, both with ``*`` and ``?``; or ``re:`` and a regular
            expression that the name begins with, as in compressed-tensors.
    """
    last = name.rpartition(".")[2]
    return any(
        re.match(pattern[3:], name) is not None
        if pattern.startswith("re:")
        else fnmatchcase(name, pattern) or fnmatchcase(last, pattern)
        for pattern in patterns
    )


def targeted(name: str, targets: str | Sequence[str]) -> bool:
    """Whether ``targets``, patterns or names of presets, mean a module."""
    each = as_patterns("targets", targets)
    return any(matches(name, PRESETS.get(target, (target,))) for target in each)


def idle(patterns: Iterable[str], names: Collection[str]) -> dict[str, str]:
    """Patterns that mean none of ``names``, and which of these is nearest, or ""; no presets."""
    last = {name.rpartition(".")[2] for name in names}
    return {
        pattern: next(iter(get_close_matches(pattern, [*last, *names], n=1)), "")
        for pattern in patterns
        if pattern not in PRESETS and not any(matches(name, (pattern,)) for name in names)
    }


def unused(pattern: str, near: str) -> str:
    """What a report says of a pattern of ``ignore`` that means nothing."""
    return f"ignore: {pattern!r} means nothing{near and f'; {near!r} is near'}"


def check_targets(targets: str | Sequence[str], names: Collection[str]) -> None:
    """Checks that each target means one of ``names``, or is a preset.

    Raises:
        ValueError: one means none.
    """
    for pattern, near in idle(as_patterns("targets", targets), names).items():
        raise ValueError(
            f"targets: expected names or patterns of matrices of the model, got {pattern!r}, "
            f"which means none{near and f'; {near!r} is near'}"
        )


def is_head(name: str) -> bool:
    """Whether a linear makes logits, by its name."""
    return name.rpartition(".")[2] in _HEADS


def left_by_default(name: str, shapes: Shapes) -> str | None:
    """Why a linear is left alone where the caller says nothing: heads, routers and their gates.

    Errors in them cost more than elsewhere and their bytes are few; engines do not look for
    quantized ones. A ``gate``, or what is in one, is a router unless an ``up`` of its shape is
    beside it.

    Args:
        name: of the linear.
        shapes: of all linears.
    """
    parts = name.split(".")
    if is_head(name) or parts[-2:] == ["shared_head", "head"]:
        return "a head, left alone by default"
    if f".{name}".endswith(tuple(f".{plain}" for plain in _PLAIN)):
        return "engines have it as it is, left alone by default"
    beside = ".".join("up" if part == "gate" else part for part in parts)
    is_router = "gate" in parts and (
        beside not in shapes or tuple(shapes[beside]) != tuple(shapes[name])
    )
    if is_router or any(part in _ROUTERS for part in parts):
        return "a router, left alone by default"
    return None


def ignoring(name: str) -> str:
    """How to leave a layer out, for errors: a list that names it alone would lose the default."""
    return f"add {name!r} to ignore, which replaces its default, heads and routers"


def refusal(
    name: str,
    shapes: Shapes,
    targets: str | Sequence[str],
    ignore: Sequence[str] | None,
) -> str | None:
    """Why a linear is left alone by its name, or None.

    Args:
        name: of the linear.
        shapes: of all linears.
        targets: what is quantized.
        ignore: what is not; None: `left_by_default`.
    """
    if not targeted(name, targets):
        return "none of targets"
    if name.rpartition(".")[2] in _READ:
        return "its weight is read past its forward"
    if ignore is None:
        return left_by_default(name, shapes)
    return "named in ignore" if matches(name, ignore) else None


def families(
    names: Iterable[str],
    shapes: Shapes,
    fused_layers: Sequence[Sequence[str]] = FUSED_LAYERS,
) -> list[list[str]]:
    """Those of ``names`` that engines fuse, two or more together.

    Args:
        names: of linears.
        shapes: of their weights; layers are fused only if their in_features are equal.
        fused_layers: as for `convert`.
    """
    known, found = dict.fromkeys(names), []
    for family in fused_layers:
        owners = dict.fromkeys(
            name[: -len(member)]
            for name in known
            for member in family
            if f".{name}".endswith(f".{member}")
        )
        for owner in owners:
            together = [f"{owner}{member}" for member in family if f"{owner}{member}" in known]
            if len(together) > 1 and len({shapes[name][-1] for name in together}) == 1:
                found.append(together)
    return found
