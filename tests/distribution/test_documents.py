"""What the documents promise: links that resolve, commands that exist, code that runs."""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path

import pytest
import torch

import jitquant
from jitquant.loader.request.sources import kernel_names
from jitquant.ops import ALL_OPS

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUNNABLE = (
    "README.md",
    *(f"docs/{name}.md" for name in ("quick-start", "concepts", "how-to", "example")),
    *(f"docs/{name}.md" for name in ("coming-from", "layers", "nvfp4-training")),
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
REPLACED = (
    "quantize_to_nvfp4",
    "quantize_activation_nvfp4",
    "quantize_nvfp4_gpu",
    "quantize_nvfp4_gpu_fused",
    "compute_amax_gsa_gpu",
    "quantize_weight_to_nvfp4",
    "deinterleave_quantize_nvfp4_cuda",
    "deinterleave_amax_quantize_nvfp4_fused",
)

OPS = {name: op for op in ALL_OPS for name in (op.function, *op.also.values())}


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), f"{link} leads nowhere"
        assert target.is_relative_to(ROOT)
        if anchor:
            assert anchor in _anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_exist(path: Path) -> None:
    for name in set(re.findall(r"\./scripts/[\w-]+", path.read_text(encoding="utf-8"))):
        assert os.access(ROOT / name, os.X_OK), f"{name} is not a command"


def test_the_readme_begins_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    first_heading = text.index("\n## ")
    assert text.index("./scripts/demo") < text.index("./scripts/test") < first_heading


@pytest.mark.parametrize(("name", "most"), [("README.md", 80), ("docs/performance.md", 150)])
def test_a_summary_stays_short(name: str, most: int) -> None:
    lines = (ROOT / name).read_text(encoding="utf-8").count("\n")
    assert lines <= most, f"{name} has {lines} lines; move details to another page"


@pytest.mark.parametrize("name", RUNNABLE)
def test_python_blocks_run(name: str) -> None:
    """A block of text right after one of Python is what that prints."""
    text = (ROOT / name).read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.S)
    assert blocks
    torch.manual_seed(0)
    scope: dict[str, object] = {}
    for block, shown in blocks:
        line = text[: text.index(block)].count("\n")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block, name, "exec"), scope)
        assert not shown or printed.getvalue() == shown


def test_coming_from_names_what_is_replaced_and_what_exists() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    for name in REPLACED:
        assert f"`{name}(" in text
    for name in set(re.findall(r"jitquant\.(\w+)", text)):
        assert hasattr(jitquant, name), f"jitquant.{name}"


def test_coming_from_names_modules_and_functions_that_exist() -> None:
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    table = text.split("| module | functions |")[1].split("\n\n")[0]
    for row in re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.M):
        module, functions = row
        assert module in kernel_names(ROOT / "kernels_cu")
        bindings = ROOT / "kernels_cu" / "bindings"
        written = (bindings / f"{module}.cpp", bindings / "declared" / f"{module}.h")
        names = "".join(path.read_text() for path in written if path.exists())
        for function, arguments in re.findall(r"`(\w+)\(([\w, ]+)\)`", functions):
            assert f'"{function}"' in names, f"{module}.{function}"
            op = OPS[function]
            assert arguments.split(", ") == op.names[: arguments.count(",") + 1], function
