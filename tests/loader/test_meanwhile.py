"""Edits between the compilers and the end of a build: what was compiled may be old by then."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jitquant.loader import CompileError
from jitquant.loader.compile import build as build_module

from .test_old_code import factor, write
from .toys import new_loader, write_factor

FACTOR = 'extern "C" int factor() {{ return {}; }}\n'
ASKED = (
    "#if __has_include(<foo.h>)\n#define FACTOR 4\n#else\n#define FACTOR 3\n#endif\n"
    'extern "C" int factor() { return FACTOR; }\n'
)
COMPUTED = "#define IN(x) <x>\n" + ASKED.replace("<foo.h>", "IN(foo.h)")


class Meanwhile:
    """What to do once: before the compilers of the first build, and after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before: list[Callable[[], object]] = []
        self.after: list[Callable[[], object]] = []
        for name, actions in (("compile_units", self.before), ("link_and_try", self.after)):
            monkeypatch.setattr(build_module, name, self._with(name, actions))

    @staticmethod
    def _with(name: str, actions: list[Callable[[], object]]) -> Callable[..., object]:
        real = getattr(build_module, name)

        def wrapped(*args: object, **options: object) -> object:
            while actions:
                actions.pop()()
            return real(*args, **options)

        return wrapped


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    return Meanwhile(monkeypatch)


def check(cache: Path, source: Path, expected: int, **arguments: object) -> None:
    for _ in range(2):  # the build, and a hit
        assert factor(new_loader(cache), source, **arguments) == expected


def two(tmp_path: Path) -> tuple[Path, Path]:
    """Directories of which the second has a header, long since."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    write_factor(second / "foo.h", 3)
    write_factor(tmp_path / "4.h", 4)
    time.sleep(0.05)
    return first, second


def replace(link: Path, target: Path) -> None:
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


def test_a_source_is_edited_and_restored(tmp_path: Path, meanwhile: Meanwhile) -> None:
    source = tmp_path / "k.cpp"
    source.write_text(FACTOR.format(3))
    meanwhile.before.append(lambda: source.write_text(FACTOR.format(4)))
    meanwhile.after.append(lambda: source.write_text(FACTOR.format(3)))
    check(tmp_path / "cache", source, 3)


def test_a_link_to_a_header_leads_elsewhere(tmp_path: Path, meanwhile: Meanwhile) -> None:
    _, second = two(tmp_path)
    source = write(tmp_path / "source" / "k.cpp", '"foo.h"')
    (source.parent / "foo.h").symlink_to(second / "foo.h")
    meanwhile.after.append(lambda: replace(source.parent / "foo.h", tmp_path / "4.h"))
    check(tmp_path / "cache", source, 4)


@pytest.mark.parametrize("through", ["link", "links/there"])
def test_a_directory_is_another(through: str, tmp_path: Path, meanwhile: Meanwhile) -> None:
    first, second = two(tmp_path)
    write_factor(first / "foo.h", 4)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "there").symlink_to(second)
    (tmp_path / "link").symlink_to(tmp_path / "links" / "there")
    time.sleep(0.05)
    source = write(tmp_path / "source" / "k.cpp")
    meanwhile.after.append(lambda: replace(tmp_path / through, first))
    check(tmp_path / "cache", source, 4, include_dirs=[tmp_path / "link"])


def test_a_directory_is_renamed(tmp_path: Path, meanwhile: Meanwhile) -> None:
    first, second = two(tmp_path)
    write_factor(first / "foo.h", 4)
    time.sleep(0.05)
    source = write(tmp_path / "source" / "k.cpp")
    meanwhile.after.append(lambda: first.rename(second.rename(tmp_path / "old") and second))
    check(tmp_path / "cache", source, 4, include_dirs=[second])


@pytest.mark.parametrize("how", ["file", "link", "link to the directory"])
def test_a_header_comes_to_be_that_shadows(how: str, tmp_path: Path, meanwhile: Meanwhile) -> None:
    first, second = two(tmp_path)
    source = write(tmp_path / "source" / "k.cpp")
    header = first / "foo.h"
    if how == "file":
        meanwhile.after.append(lambda: write_factor(header, 4))
    elif how == "link":
        meanwhile.after.append(lambda: header.symlink_to(tmp_path / "4.h"))
    else:
        write_factor(header, 4)
        first.rename(tmp_path / "elsewhere")
        time.sleep(0.05)
        meanwhile.after.append(lambda: first.symlink_to(tmp_path / "elsewhere"))
    check(tmp_path / "cache", source, 4, cxx_flags=[f"-I{first}", f"-I{second}"])


@pytest.mark.parametrize("part", ["", "deep"])
def test_a_directory_is_replaced_and_gets_a_file(
    part: str, tmp_path: Path, meanwhile: Meanwhile
) -> None:
    """Its date is then that of the file, as if it had been there before."""
    first, second = two(tmp_path)
    source = write(tmp_path / "source" / "k.cpp", f"<{part}/foo.h>" if part else "<foo.h>")
    for place, value in ((first, 4), (second, 3)):
        (place / part).mkdir(exist_ok=True)
        write_factor(place / part / "foo.h", value)
    time.sleep(0.05)

    def swap() -> None:
        (second / part).rename(tmp_path / "old")
        (first / part).rename(second / part)
        (second / part / "other").write_text("")

    meanwhile.after.append(swap)
    check(tmp_path / "cache", source, 4, include_dirs=[second])


def test_a_header_that_shadowed_is_removed(tmp_path: Path, meanwhile: Meanwhile) -> None:
    first, second = two(tmp_path)
    write_factor(first / "foo.h", 4)
    source = write(tmp_path / "source" / "k.cpp")
    meanwhile.after.append((first / "foo.h").unlink)
    check(tmp_path / "cache", source, 3, include_dirs=[first, second])


def test_a_header_is_removed_and_comes_back(tmp_path: Path, meanwhile: Meanwhile) -> None:
    """As by a checkout of another branch, and back."""
    source = write(tmp_path / "source" / "k.cpp", '"foo.h"')
    write_factor(source.parent / "foo.h", 3)
    meanwhile.after.append((source.parent / "foo.h").unlink)
    with pytest.raises(CompileError, match=r"foo\.h: No such file"):
        new_loader(tmp_path / "cache").get("k", [source])
    write_factor(source.parent / "foo.h", 4)
    check(tmp_path / "cache", source, 4)


@pytest.mark.parametrize("name", ["<deep/foo.h>", '"../around/foo.h"', '"{}/around/foo.h"'])
@pytest.mark.parametrize("then", ["", "others come and go"])
def test_a_header_elsewhere_that_is_asked_for_goes(
    name: str, then: str, tmp_path: Path, meanwhile: Meanwhile, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = two(tmp_path)
    header = first / "deep" / "foo.h" if "deep" in name else tmp_path / "around" / "foo.h"
    header.parent.mkdir()
    header.write_text("")
    source = tmp_path / "source" / "k.cpp"
    source.parent.mkdir()
    source.write_text(ASKED.replace("<foo.h>", name.replace("{}", str(tmp_path))))
    meanwhile.after.append(header.unlink)
    if then:
        real = build_module.link_and_try

        def link_and_try(*args: object, **options: object) -> object:
            (header.parent / "other").touch()
            (header.parent / "other").unlink()
            return real(*args, **options)

        monkeypatch.setattr(build_module, "link_and_try", link_and_try)
    check(tmp_path / "cache", source, 3, include_dirs=[first])


@pytest.mark.parametrize("comes", [False, True])
@pytest.mark.parametrize("text", [ASKED, COMPUTED])
def test_a_header_that_is_asked_for_comes_or_goes(
    text: str, comes: bool, tmp_path: Path, meanwhile: Meanwhile
) -> None:
    first, _ = two(tmp_path)
    source = tmp_path / "k.cpp"
    source.write_text(text)
    if comes:
        meanwhile.after.append(lambda: (first / "foo.h").write_text(""))
    else:
        (first / "foo.h").write_text("")
        meanwhile.after.append((first / "foo.h").unlink)
    check(tmp_path / "cache", source, 4 if comes else 3, include_dirs=[first])
