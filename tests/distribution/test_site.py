"""The documentation as a site: every page is in the menu, every public name has an entry."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jitquant

ROOT = Path(__file__).resolve().parents[2]
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
PAGES = re.findall(r": (\S+\.md)$", NAV, re.M)
API = re.findall(
    r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
)


def test_every_page_is_in_the_menu_once() -> None:
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert documents - set(PAGES) == set()
    assert [page for page in PAGES if not (ROOT / page).is_file()] == []
    assert len(PAGES) == len(set(PAGES))


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("jitquant", set(jitquant.__all__) - {"QuantizedActivation", "__version__"}),
        ("jitquant.nn", set(jitquant.nn.__all__)),
        ("jitquant.testing", set(jitquant.testing.__all__)),
    ],
)
def test_the_api_reference_has_every_public_name(module: str, names: set[str]) -> None:
    listed = [name.rpartition(".")[2] for name in API if name.rpartition(".")[0] == module]
    assert len(listed) == len(set(listed))
    assert set(listed) == names, "docs/api.md needs a row and an entry for each public name"


@pytest.mark.slow
def test_the_site_builds_without_warnings() -> None:
    """./scripts/test --all installs mkdocs; a broken link or an unknown name is an error."""
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("mkdocs is not installed: ./scripts/test --all, or pip install -e '.[docs]'")
    built = subprocess.run(
        [ROOT / "scripts" / "docs"],
        env={**os.environ, "JITQUANT_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    site = ROOT / "out" / "docs" / "site"
    api = (site / "docs" / "api.html").read_text(encoding="utf-8")
    assert [name for name in API if f'id="{name}"' not in api] == []
    assert "SwiGLU" in (site / "results" / "overview.svg").read_text(encoding="utf-8")
