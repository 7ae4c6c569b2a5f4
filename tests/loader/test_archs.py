"""Names of architectures, and which are compiled for."""

from __future__ import annotations

import pytest

from jitquant.loader import UnsupportedArchError
from jitquant.loader.machine.archs import choose_archs, gencode_flags, parse_archs


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("9.0", ("90a",)),
        ("9.0a", ("90a",)),
        ("90", ("90a",)),
        ("90a", ("90a",)),
        ("sm_90a", ("90a",)),
        ("compute_90a", ("90a",)),
        ("10.0", ("100a",)),
        ("10.0f", ("100f",)),
        ("100f", ("100f",)),
        ("10.3", ("103a",)),
        ("12.0", ("120a",)),
        ("12.1", ("121a",)),
        ("8.0", ("80",)),
        ("sm_86", ("86",)),
        ("8.0+PTX", ("80+ptx",)),
        ("9.0;10.0", ("90a", "100a")),
        ("90a,100a", ("90a", "100a")),
        ("8.0 8.6 9.0+PTX", ("80", "86", "90a+ptx")),
        (["12.0", "sm_90a", "9.0"], ("90a", "120a")),
        ("Hopper", ("90a",)),
        ("Ampere;Ada", ("80", "86", "89")),
    ],
)
def test_forms(given: str | list[str], expected: tuple[str, ...]) -> None:
    assert parse_archs(given) == expected


@pytest.mark.parametrize(
    "given",
    ["7.5", "sm_70", "6.0", "13.0", "99", "sm90", "nine", "", ";", "8.0a", "9.0f", "native"],
)
def test_refused_forms_name_those_accepted(given: str) -> None:
    with pytest.raises(UnsupportedArchError, match=r"Accepted: 8\.0, .*in the forms 9\.0, 9\.0a"):
        parse_archs(given)


def test_flags_of_nvcc() -> None:
    assert gencode_flags(("80+ptx", "90a", "100f", "90a+ptx")) == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100f,code=sm_100f",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=compute_90",
    )


@pytest.mark.parametrize(
    ("explicit", "own", "torch", "gpus", "expected", "origin"),
    [
        ("8.0", "9.0", "8.6", ("100a",), ("80",), "archs="),
        (None, "9.0", "8.6", ("100a",), ("90a",), "JITQUANT_CUDA_ARCHS"),
        (None, "native", "8.6", ("100a",), ("100a",), "JITQUANT_CUDA_ARCHS"),
        (None, None, "8.6", (), ("86",), "TORCH_CUDA_ARCH_LIST"),
        (None, None, "8.6", ("100a",), ("86", "100a"), "TORCH_CUDA_ARCH_LIST"),
        (None, None, "10.0f+PTX", ("100a",), ("100f+ptx",), "TORCH_CUDA_ARCH_LIST"),
        (None, None, "7.0 7.5 9.0", (), ("90a",), "TORCH_CUDA_ARCH_LIST"),
        (None, None, None, ("90a", "100a"), ("90a", "100a"), "visible GPUs"),
        (None, None, None, (), ("90a",), "default, no GPU is visible"),
    ],
)
def test_order_of_precedence(
    explicit: str | None,
    own: str | None,
    torch: str | None,
    gpus: tuple[str, ...],
    expected: tuple[str, ...],
    origin: str,
) -> None:
    environment = {"JITQUANT_CUDA_ARCHS": own, "TORCH_CUDA_ARCH_LIST": torch}
    choice = choose_archs(explicit, env=environment.get, native=lambda: gpus)
    assert (choice.archs, choice.origin) == (expected, origin)


def test_list_of_old_architectures_alone_is_refused() -> None:
    environment = {"TORCH_CUDA_ARCH_LIST": "7.0 7.5"}
    with pytest.raises(UnsupportedArchError, match="from TORCH_CUDA_ARCH_LIST"):
        choose_archs(None, env=environment.get, native=lambda: ())
    assert choose_archs(None, env=environment.get, native=lambda: ("90a",)).skipped == (
        "7.0",
        "7.5",
    )
