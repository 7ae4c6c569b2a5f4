"""Two ranks on the CPU, over gloo: ``process_group.py`` has the cases."""

from __future__ import annotations

import pytest

from .ranks import names_of, run


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run("process_group", "cpu", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", names_of("process_group", "cpu"))
def test_on_two_ranks(name: str, outcomes: dict[str, str]) -> None:
    assert outcomes[name] == ""
