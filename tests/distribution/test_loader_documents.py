"""docs/loader.md and docs/errors.md: their examples run, their tables are whole."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest
from loader.toys import nvcc_or_reason

import jitquant.loader
from jitquant.cli import main
from jitquant.cli.app import app
from jitquant.loader import errors, settings
from jitquant.loader.tools.doctor import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
LOADER = (ROOT / "docs" / "loader.md").read_text(encoding="utf-8")
ERRORS = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
#: Set for the compilers or by the tests of a program, not by people for jitquant.
NOT_SETTINGS = {"PATH", "LC_ALL", "HOME", *settings._OF_OTHERS}


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the sources that the documents show, and a cache in it."""
    reason = nvcc_or_reason()
    if reason is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("documents")
    for block in blocks(LOADER, "cpp"):
        name = re.match(r"// (\w+\.cu)\n", block)
        assert name is not None
        (directory / name[1]).write_text(block)
    return directory


@pytest.fixture
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(place)
    monkeypatch.setenv("JITQUANT_CACHE_DIR", str(place / "cache"))
    monkeypatch.setenv("JITQUANT_CUDA_ARCHS", "90a")
    for variable in ("JITQUANT_BUNDLES", "JITQUANT_JOBS", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.delenv(variable, raising=False)
    return place


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(LOADER, id="loader.md", marks=pytest.mark.slow),
        pytest.param(ERRORS, id="errors.md"),
    ],
)
def test_python_examples_run(text: str, there: Path) -> None:
    found = blocks(text, "python")
    assert found
    scope: dict[str, object] = {}
    for block in found:
        exec(compile(block, "the document", "exec"), scope)
    if text is LOADER:
        assert scope["module"].scale.overloads()  # type: ignore[attr-defined]


COMMANDS = [
    line.removeprefix("$ jitquant ")
    for block in blocks(LOADER, "console")
    for line in block.splitlines()
]


@pytest.mark.parametrize(
    "command",
    [  # to compile for several architectures takes long
        pytest.param(command, marks=pytest.mark.slow if "--arch" in command else ())
        for command in COMMANDS
    ],
)
def test_commands_run(
    command: str, there: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITQUANT_JOBS", "")  # a command may set it
    assert main(shlex.split(command)) == 0, capfd.readouterr().err


def test_the_table_of_commands_is_whole() -> None:
    table = LOADER.split("| command | what it does |")[1].split("\n\n")[0]
    first = re.findall(r"^\| (.*?) \|", table, re.M)
    named = {word for cell in first for word in re.findall(r"`([a-z-]+)", cell)}
    registered = {c.name or c.callback.__name__ for c in app.registered_commands}  # type: ignore[union-attr]
    (group,) = app.registered_groups
    inner = {c.name or c.callback.__name__ for c in group.typer_instance.registered_commands}  # type: ignore[union-attr]
    assert named == registered | inner | {"cache"}


def test_every_flag_that_makes_a_part_is_named() -> None:
    flags = {
        flag
        for path in (ROOT / "jitquant" / "ops").glob("*.py")
        for flag in re.findall(r"-DJITQUANT_\w+", path.read_text(encoding="utf-8"))
    }
    assert len(flags) > 3
    assert not [flag for flag in sorted(flags) if f"`{flag}" not in LOADER]


def strings_of(path: Path) -> list[str]:
    """The strings of a module, with "…" for what a formatted string puts in."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
            found.append("".join(map(str, parts)))
    return found


def test_the_table_of_variables_is_whole_and_the_only_one() -> None:
    read: set[str] = set()
    for path in (ROOT / "jitquant").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "environ" in text or "env" in text:
            read |= {s for s in strings_of(path) if re.fullmatch(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+", s)}
            read |= {name for name in ("CXX", "INCLUDES") if f'"{name}"' in text}
    names = {
        name
        for name in read
        if re.match(r"JITQUANT_|TORCH_(CUDA|EXT\w+_DIR)|CUDA_|NVCC_|C\w*PATH|LIB|COMP|GCC", name)
    }
    names = {name for name in names if not name.endswith(("_EXPORT", "NOT_FOUND"))}
    table = LOADER.split("| variable | meaning | default |")[1].split("\n\n")[0]
    cells = re.findall(r"^\| (.*?) \|", table, re.M)[1:]
    listed = [name for cell in cells for name in re.findall(r"`([A-Z_]+)`", cell)]
    assert len(listed) == len(set(listed))
    assert names - NOT_SETTINGS <= set(listed), names - set(listed)
    assert not [name for name in listed if name not in read | {"TMPDIR", "CPATH"}]
    assert LOADER.count("| variable |") == 1
    of_jitquant = {*SETTINGS, "JITQUANT_COMPUTE"}
    assert {name for name in listed if name.startswith("JITQUANT_")} == of_jitquant


def test_every_error_is_there() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and name[0] != "_"
    }
    documented = set(re.findall(r"^### (\w+)$", ERRORS, re.M))
    assert documented == classes
    assert classes <= set(jitquant.loader.__all__)


@pytest.mark.parametrize("quote", re.findall(r"^> (.+)$", ERRORS, re.M))
def test_messages_are_those_that_are_said(quote: str) -> None:
    said = [
        " ".join(text.split())
        for path in (ROOT / "jitquant" / "loader").rglob("*.py")
        for text in strings_of(path)
    ]
    assert [text for text in said if quote in text], quote
