"""Objects that are kept between runs: which are made again, and which are not."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from host_code import compiled, link


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source with a header, and a compiler that writes a line to ``log`` when it compiles."""
    folder = tmp_path / "with a space"
    folder.mkdir()
    (folder / "value.h").write_text("#define VALUE 1\n")
    (folder / "value.cpp").write_text(
        '#include "value.h"\nextern "C" int value() { return VALUE; }'
    )
    wrapper = tmp_path / "wrapper"
    log = tmp_path / "log"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *-c*) echo compiled >> "{log}" ;; esac\nexec c++ "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return folder / "value.cpp"


def _value(source: Path, *arguments: str) -> tuple[int, int]:
    """What the function returns, and how often the compiler has run."""
    folder = source.parents[1]
    made = compiled([*arguments, source], folder / "kept")
    number = len(list(folder.glob("*.so")))
    library = ctypes.CDLL(str(link([made], folder / f"{number}.so")))
    return library.value(), (folder / "log").read_text().count("compiled")


def test_the_same_content_is_compiled_once(source: Path) -> None:
    assert _value(source) == (1, 1)
    assert _value(source) == (1, 1)
    source.touch()
    assert _value(source) == (1, 1)


def test_another_header_or_argument_is_compiled_and_both_are_kept(source: Path) -> None:
    assert _value(source) == (1, 1)
    header = source.with_name("value.h")
    header.write_text("#define VALUE 2\n")
    assert _value(source) == (2, 2)
    header.write_text("#define VALUE 1\n")
    assert _value(source) == (1, 2)
    assert _value(source, "-O2") == (1, 3)


def test_a_damaged_object_is_made_again(source: Path) -> None:
    assert _value(source) == (1, 1)
    (made,) = (source.parents[1] / "kept").glob("*/*.o")
    made.write_bytes(made.read_bytes()[:100])
    assert _value(source) == (1, 2)


def test_several_at_once_compile_once(source: Path) -> None:
    folder = source.parents[1]
    with ThreadPoolExecutor(4) as pool:
        made = set(pool.map(lambda _: compiled([source], folder / "kept"), range(4)))
    assert len(made) == 1
    assert (folder / "log").read_text() == "compiled\n"


def test_an_error_begins_with_what_the_compiler_says_first(source: Path) -> None:
    source.write_text("int before;\nint value() { return nowhere; }\n")
    with pytest.raises(RuntimeError) as raised:
        _value(source)
    assert str(raised.value).splitlines()[0].endswith("not declared in this scope")
    assert f"{source}:2:" in str(raised.value).splitlines()[0]
