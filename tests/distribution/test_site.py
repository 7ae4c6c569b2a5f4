"""The documentation as a site: every page is in the menu, every public name has an entry."""

from __future__ import annotations

import ast
import importlib.util
import inspect
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
    r"^::: (\S+)$(?:\n    options:\n      members: \[(.*)\])?",
    (ROOT / "docs" / "api.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


def _documented() -> dict[str, list[str]]:
    """The public names of each module that has an entry: its ``__all__``, or those it lists."""
    documented = {}
    for name, members in API:
        public = _all_of(name)
        documented[name] = members.split(", ") if members else public
        assert set(documented[name]) <= set(public)
    return documented


def _all_of(module: str) -> list[str]:
    """A module's ``__all__`` by its text: some modules import what may not be installed."""
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    source = path.read_text(encoding="utf-8")
    (value,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]
    )
    names: list[str] = ast.literal_eval(value)
    return names


def test_every_page_is_in_the_menu_once() -> None:
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert not documents - set(PAGES), f"mkdocs.yml lacks {documents - set(PAGES)}"
    gone = [page for page in PAGES if not (ROOT / page).is_file()]
    assert not gone, f"mkdocs.yml names pages that do not exist: {gone}"
    assert len(PAGES) == len(set(PAGES))


@pytest.mark.parametrize(
    "names",
    [set(jitquant.__all__) - {"__version__"}, set(jitquant.nn.__all__), jitquant.testing.__all__],
    ids=["jitquant", "nn", "testing"],
)
def test_the_api_reference_has_every_public_name(names: set[str]) -> None:
    listed = [name for public in _documented().values() for name in public]
    assert len(listed) == len(set(listed))
    assert set(names) <= set(listed), "docs/api.md needs an entry for the module"


@pytest.mark.parametrize(
    "function",
    [
        *(getattr(jitquant, name) for name in jitquant.__all__),
        *(getattr(jitquant.nn, name) for name in jitquant.nn.__all__),
    ],
    ids=lambda function: getattr(function, "__name__", "value"),
)
def test_a_docstring_describes_every_argument(function: object) -> None:
    if not inspect.isfunction(function):
        return
    arguments = set(inspect.signature(function).parameters) - {"args", "kwargs"}
    text = (inspect.getdoc(function) or "").partition("Args:\n")[2].split("\n\n")[0]
    described = re.findall(r"^ {4}(\w[\w, *\n]*):", text, re.MULTILINE)
    names = {name for line in described for name in re.split(r"[,\s]+", line)}
    assert arguments <= names, f"{function.__name__} does not describe {arguments - names}"


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
    names = [f"{module}.{name}" for module, public in _documented().items() for name in public]
    assert [name for name in names if f'id="{name}"' not in api] == []
    assert "SwiGLU" in (site / "results" / "overview.svg").read_text(encoding="utf-8")
