"""``jitquant doctor``."""

from __future__ import annotations

import re

import pytest

from jitquant.loader.tools import doctor as examined

from .conftest import Run


@pytest.fixture(autouse=True)
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own tests try the build."""
    monkeypatch.setattr(examined, "try_build", lambda plan_of: 0.5)


def test_for_people_and_for_machines(run: Run) -> None:
    found = run("doctor", "--json").json
    shown = run("doctor")
    assert shown.code == (0 if found["works"] else 1)
    # Free memory and times differ between the two calls.
    text = re.sub(r"[0-9.]+", "0", shown.out)
    for finding in found["findings"]:
        assert re.sub(r"[0-9.]+", "0", finding["text"].splitlines()[0])[:40] in text
        assert finding["fix"] in shown.out
    assert shown.out.splitlines()[-1].startswith("A build works here. (")


def test_the_exit_code_says_whether_a_build_would_work(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan_of: object) -> float:
        raise OSError("[no] compiler")

    monkeypatch.setattr(examined, "try_build", fail)
    shown = run("doctor")
    assert shown.code == 1
    assert "[no] compiler" in shown.out
    assert "A build does not work here." in shown.out
    assert run("doctor", "--json").code == 1
