"""Old code by a detour: names that are computed, directories that are others too, scripts."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from quick import in_quick

from jitquant.loader import CompileError, Loader
from jitquant.loader.machine.memo import Signature
from jitquant.loader.request import plan as plan_module
from jitquant.loader.request.directives import parse
from jitquant.loader.request.includes import Searched, look_at, visible_now
from jitquant.loader.request.plan import Request
from jitquant.loader.request.searches import IncludePath, Unit, searched_by
from jitquant.loader.request.sources import Roots

from .test_old_code import archive, factor, incbin, write
from .toolkits import write_toolkit
from .toys import new_loader, write_factor

FACTOR = 'extern "C" int factor() { return FACTOR; }\n'
NAME = "#define TEXT(x) #x\n#define NAME(x) TEXT(x)\n"
ASKED = f"#define FACTOR 4\n#else\n#define FACTOR 3\n#endif\n{FACTOR}"


def check(loader: Loader, source: Path, expected: int, **arguments: object) -> None:
    """In this process and in a new one."""
    live = factor(loader, source, **arguments)
    (cache,) = {loader.chosen_cache().root}
    assert (live, factor(new_loader(cache), source, **arguments)) == (expected, expected)


def directories(tmp_path: Path, *names: str) -> list[Path]:
    made = [tmp_path / name for name in names]
    for directory in made:
        directory.mkdir(parents=True)
    return made


@pytest.mark.parametrize(
    "text",
    in_quick(
        2,
        [
            '#define H "foo.h"\n#include H\n',
            '#include /* a\n */ "foo.h"\n',
            '#include \\\n"foo.h"\n',
            '/* a\n */ # include "foo.h"\n',
            '%:include "foo.h"\n',
            '\f#\vinclude "foo.h"\n',
            'int x;\r#include "foo.h"\r',
        ],
    ),
)
def test_a_header_beside_the_source_shadows_however_it_is_included(
    text: str, tmp_path: Path, loader: Loader
) -> None:
    source, include = directories(tmp_path, "source", "include")
    source /= "k.cpp"
    source.write_bytes(f"{text}{FACTOR}".encode())
    write_factor(include / "foo.h", 3)
    assert factor(loader, source, include_dirs=[include]) == 3
    write_factor(source.parent / "foo.h", 4)
    check(loader, source, 4, include_dirs=[include])


@pytest.mark.parametrize(
    "text",
    in_quick(
        9,
        [
            "#define HAS(x) __has_include(x)\n#define H <foo.h>\n#define HAVE HAS(H)\n#if HAVE\n",
            "#define H __has_include\n#define HAS(x) H(x)\n#define HAVE HAS(<foo.h>)\n#if HAVE\n",
            "#define LEFT (\n#define RIGHT )\n#if __has_include LEFT <foo.h> RIGHT\n",
            "#define HAS(x) __has_include(x)\n#define IN(x) <x>\n#if HAS(IN(foo.h))\n",
            "#ifdef G\n#define H <a.h>\n#endif\n#define G <foo.h>\n#define H G\n"
            "#if __has_include(H)\n",
            "#define H <foo.h>\n#if __has_include(H)\n",
            "#if __has_include( \\\n <foo.h>)\n",
            "#if __has_include(/* a */ <foo.h>)\n",
            "#define HAS(x) __has_include(x)\n#if HAS(<foo.h>)\n",
            "#define HAS __has_include(<foo.h>)\n#if HAS\n",
            "#define G <foo.h>\n#define H G\n#if __has_include(H)\n",
            "#define IN(x) <x>\n#if __has_include(IN(foo.h))\n",
            "#define TEXT(x) #x\n#define H TEXT(foo.h)\n#if __has_include(H)\n",
            '#if __has_include("{}/include/foo.h")\n',
            "#define HAS(x) __has_include(x)\n#define H <foo.h>\n#if HAS(H)\n",
            "#define HAS __has_include\n#define IN(x) <x>\n#if HAS(IN(foo.h))\n",
            "#define HAS(x) __has_include(x)\n#define HAVE HAS(<foo.h>)\n#if HAVE\n",
            "#define H __has_include\n#define HAS(x) H(x)\n#define IN(x) <x>\n"
            "#define HAVE HAS(IN(foo.h))\n#if HAVE\n",
            "#define HAS(x, y) __has_include(x) && y\n#if HAS(<foo.h>, 1)\n",
            "#define H (<foo.h>)\n#if __has_include H\n",
            "#if __has_include(<fo\\ \no.h>)\n",
            "#\0if\0__has_include\0(<foo.h>)\n",
        ],
    ),
)
def test_a_header_comes_to_be_that_was_asked_for(text: str, tmp_path: Path, loader: Loader) -> None:
    source, include = directories(tmp_path, "source", "include")
    source /= "k.cpp"
    source.write_text(text.replace("{}", str(tmp_path)) + ASKED)
    assert factor(loader, source, include_dirs=[include]) == 3
    (include / "foo.h").write_text("")
    check(loader, source, 4, include_dirs=[include])


@pytest.mark.parametrize(
    "name",
    in_quick(
        3,
        [
            *("a/FOLDER/foo.h", "../foo.h", "a b/fold@1/FOLDER/foo.h"),
            *("FOLDER/b/foo.h", "../../foo.h", "../a/FOLDER/foo.h"),
        ],
    ),
)
def test_a_header_comes_to_be_in_a_folder_whose_name_is_computed(
    name: str, tmp_path: Path, loader: Loader
) -> None:
    (source,) = directories(tmp_path, "around/source")
    header = source / name.replace("FOLDER", "folder")
    header.parent.mkdir(parents=True, exist_ok=True)
    source /= "k.cpp"
    source.write_text(f"{NAME}#define FOLDER folder\n#if __has_include(NAME({name}))\n{ASKED}")
    assert factor(loader, source) == 3
    header.write_text("")
    check(loader, source, 4)


@pytest.mark.parametrize(
    "text",
    in_quick(
        4,
        [
            'G "{}/later/foo.h"|G',
            "-DROOT={}/later|NAME(ROOT/foo.h)",
            "UP ..|NAME(UP/UP/later/foo.h)",
            "TWICE(x) x/x|NAME(TWICE(..)/later/foo.h)",
            "ROOT {}|NAME(ROOT/later/foo.h)",
            "FOLDER later|NAME({}/FOLDER/foo.h)",
            "ROOT(x) {}/x|NAME(ROOT(later/foo.h))",
            "UP(x) ../x|NAME(UP(UP(later/foo.h)))",
            "-DUP=..|NAME(UP/UP/later/foo.h)",
        ],
    ),
)
def test_a_header_comes_to_be_outside_on_a_way_that_is_computed(
    text: str, tmp_path: Path, loader: Loader
) -> None:
    (source,) = directories(tmp_path, "around/source")
    source /= "k.cpp"
    macro, name = text.replace("{}", str(tmp_path)).split("|")
    flags = [macro] if macro.startswith("-D") else []
    defined = "" if flags else f"#define {macro}\n"
    source.write_text(f"{NAME}{defined}#define H {name}\n#if __has_include(H)\n{ASKED}")
    assert factor(loader, source, cxx_flags=flags) == 3
    (later,) = directories(tmp_path, "later")
    (later / "foo.h").write_text("")
    check(loader, source, 4, cxx_flags=flags)


def test_thousands_of_comments_after_a_directive_are_read_once() -> None:
    """To try each way to divide them would take forever."""
    comments = b"/* a *//**/ /* b\n **/" * 5000
    text = b"#define A " + comments + b"1\n"
    text += b"".join(b"#define B%d /* of %d */\n" % (i, i) for i in range(5000))
    text += b"#include " + comments + b"<foo.h>\n#define C /* * / */ <bar.h> /* */\n"
    found = parse(text)
    assert [include.name for include in found.includes] == ["foo.h"]
    assert [(name, include.name) for name, include in found.macros] == [(b"C", "bar.h")]


def test_a_name_that_two_macros_lead_to_may_have_any_letters(
    tmp_path: Path, loader: Loader
) -> None:
    source, place = directories(tmp_path, "source", "a, b")
    source /= "k.cpp"
    source.write_text(f'#define G "{place}/foo.h"\n#define H G\n#if __has_include(H)\n{ASKED}')
    assert factor(loader, source) == 3
    (place / "foo.h").write_text("")
    check(loader, source, 4)


@pytest.mark.parametrize("name", in_quick(1, ["../foo.h", "{}/foo.h", "../around/foo.h"]))
def test_a_header_elsewhere_asks_for_a_name_that_is_computed(
    name: str, tmp_path: Path, loader: Loader
) -> None:
    """It is included by its path, so no directory that is searched leads to it."""
    source, elsewhere, _ = directories(tmp_path, "source", "elsewhere", "around")
    source /= "k.cpp"
    name = name.format(tmp_path)
    (elsewhere / "asks.h").write_text(f"{NAME}#if __has_include(NAME({name}))\n{ASKED}")
    source.write_text(f'#include "{elsewhere}/asks.h"\n')
    assert factor(loader, source) == 3
    (elsewhere / name).write_text("")
    check(loader, source, 4)


@pytest.mark.parametrize(
    ("flag", "place"),
    [
        ("-DH=<foo.h>", "include"),
        ('-DH="foo.h"', "source"),
        ("@{}/flags", "include"),
        ("-DHAS=__has_include(<foo.h>)", "include"),
    ],
)
def test_a_header_comes_to_be_that_a_flag_names(
    flag: str, place: str, tmp_path: Path, loader: Loader
) -> None:
    source, include = directories(tmp_path, "source", "include")
    source /= "k.cpp"
    source.write_text(f"#if {'HAS' if 'HAS' in flag else '__has_include(H)'}\n{ASKED}")
    (tmp_path / "flags").write_text("'-DH=<foo.h>'\n")
    given = {"include_dirs": [include], "cxx_flags": [flag.format(tmp_path)]}
    assert factor(loader, source, **given) == 3
    (tmp_path / place / "foo.h").write_text("")
    check(loader, source, 4, **given)


@pytest.mark.slow
def test_nvcc_tells_the_macros_of_its_flags(tmp_path: Path, nvcc: None, loader: Loader) -> None:
    source, include = directories(tmp_path, "source", "include")
    source /= "k.cu"
    source.write_text(f"#if __has_include(H)\n{ASKED}")
    given = {"include_dirs": [include], "cuda_flags": ["-DH=<foo.h>"]}
    assert factor(loader, source, **given) == 3
    (include / "foo.h").write_text("")
    check(loader, source, 4, **given)


def test_a_directory_with_the_name_of_a_header_is_passed_over(
    tmp_path: Path, loader: Loader
) -> None:
    first, second = directories(tmp_path, "first", "second")
    (first / "foo.h").mkdir()
    asks, includes = tmp_path / "asks.cpp", write(tmp_path / "includes.cpp")
    asks.write_text(f"#if __has_include(<foo.h>)\n{ASKED}")
    given = {"include_dirs": [first, second]}
    assert factor(loader, asks, **given) == 3
    write_factor(second / "foo.h", 3)
    check(loader, asks, 4, **given)
    assert factor(loader, includes, **given) == 3
    (first / "foo.h").rmdir()
    write_factor(first / "foo.h", 4)
    check(loader, includes, 4, **given)


def test_a_file_system_may_not_tell_cases_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then foo.h is found where a directory has FOO.H."""
    roots, searched = Roots({"src0": str(tmp_path)}), [Searched(["src0/"], {"foo.h": 1})]
    assert not visible_now(searched, roots).names
    (tmp_path / "foo.h").write_text("")
    monkeypatch.setattr(os, "listdir", lambda place: ["FOO.H"])
    assert visible_now(searched, roots).names == ["src0/foo.h"]


def test_what_embed_reads_is_searched_as_a_header(tmp_path: Path) -> None:
    """GCC 15 and clang 19 have it."""
    (place,) = directories(tmp_path, "place")
    source = tmp_path / "k.cpp"
    source.write_text("#if __has_embed(<a.bin> limit(1))\n#embed <b.bin> limit(1)\n#endif\n")
    (place / "b.bin").write_bytes(b"b")
    path = IncludePath((), (str(tmp_path), str(place)))
    roots = Roots({"src0": str(tmp_path)})
    ((searched, _), _) = searched_by([Unit(str(source), (str(place / "b.bin"),), path)], roots)
    assert searched.names == {"a.bin": 2, "b.bin": 1}


def test_parameters_of_macros_are_no_names(tmp_path: Path) -> None:
    """Or any new file in a directory that is searched would count."""
    source = tmp_path / "k.cpp"
    source.write_text(
        "#define H(x) __has_include(x)\n#define HAS(x) H(x)\n#define OTHER(x) printf(x)\n"
        "#define SAYS OTHER(TEXT) OTHER(<text>)\n#ifdef __has_include\n#if HAS(<a.h>)\n"
    )
    unit = Unit(str(source), (), IncludePath((), (str(tmp_path),)))
    ((searched, _), _) = searched_by([unit], Roots({"src0": str(tmp_path)}))
    assert searched.names == {"a.h": 1}


def test_no_precompiled_header_is_taken(tmp_path: Path, loader: Loader) -> None:
    """GCC takes it for a header that was edited since, and says of neither that it was read."""
    source = tmp_path / "k.cpp"
    source.write_text(f'#include "foo.h"\n{FACTOR}')
    header = tmp_path / "foo.h"
    write_factor(header, 2)
    forms = ["-O2", "-fPIC", "-fno-gnu-unique", "-fno-canonical-system-headers", "-std=c++20"]
    made = [*forms, "-x", "c++-header", str(header), "-o", f"{header}.gch"]
    subprocess.run(["g++", *made], check=True)
    for value in (3, 4):
        write_factor(header, value)
        check(loader, source, value)


def test_a_copy_of_a_header_that_is_read_once_is_edited(tmp_path: Path, loader: Loader) -> None:
    """GCC passes over a file with the contents and the time of one with #pragma once."""
    (tmp_path / "k.cpp").write_text(f'#include "a/foo.h"\n#include "b/foo.h"\n{FACTOR}')
    once = "#pragma once\n#undef FACTOR\n#define FACTOR {}\n"
    for place in directories(tmp_path, "a", "b"):
        (place / "foo.h").write_text(once.format(3))
        os.utime(place / "foo.h", (1, 1))
    assert factor(loader, tmp_path / "k.cpp") == 3
    (tmp_path / "b" / "foo.h").write_text(once.format(4))
    check(loader, tmp_path / "k.cpp", 4)


def test_a_next_header_comes_to_be_that_was_asked_for(tmp_path: Path, loader: Loader) -> None:
    first, second = directories(tmp_path, "first", "second")
    (first / "foo.h").write_text(
        "#if __has_include_next(<foo.h>)\n#include_next <foo.h>\n#else\n#define FACTOR 3\n#endif\n"
    )
    source = write(tmp_path / "source" / "k.cpp")
    assert factor(loader, source, include_dirs=[first, second]) == 3
    write_factor(second / "foo.h", 4)
    check(loader, source, 4, include_dirs=[first, second])


@pytest.mark.parametrize("link", in_quick(1, ["first/foo.h", "first/deep", "first"]))
def test_a_link_comes_to_lead_somewhere(link: str, tmp_path: Path, loader: Loader) -> None:
    """As where the target is generated, or mounted, later."""
    name = "deep/foo.h" if link.endswith("deep") else "foo.h"
    later, second = directories(tmp_path, "later", "second")
    (second / name).parent.mkdir(exist_ok=True)
    write_factor(second / name, 3)
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(later / "target")
    source = write(tmp_path / "source" / "k.cpp", f"<{name}>")
    flags = [f"-I{tmp_path}/first", f"-I{second}"]
    assert factor(loader, source, cxx_flags=flags) == 3
    time.sleep(0.15)  # or everything is so new that nothing is trusted
    check(loader, source, 3, cxx_flags=flags)
    if link.endswith(".h"):
        write_factor(later / "target", 4)
    else:
        (later / "target").mkdir()
        write_factor(later / "target" / "foo.h", 4)
    check(loader, source, 4, cxx_flags=flags)


@pytest.mark.parametrize("calls", in_quick(1, [2, 8]))
def test_a_link_in_a_chain_comes_to_lead_elsewhere(
    calls: int, tmp_path: Path, loader: Loader
) -> None:
    """Live processes look again after several calls, and then at what has changed."""
    first, second, a, b, c = directories(tmp_path, "first", "second", "a", "b", "c")
    write_factor(second / "foo.h", 3)
    (first / "foo.h").symlink_to("../a/foo.h")
    (a / "foo.h").symlink_to(b / "foo.h")
    source = write(tmp_path / "source" / "k.cpp", "<foo.h>")
    time.sleep(0.15)  # or everything is so new that nothing is trusted
    for _ in range(calls):
        assert factor(loader, source, include_dirs=[first, second]) == 3
    write_factor(c / "foo.h", 4)
    (a / "foo.h").unlink()
    (a / "foo.h").symlink_to(c / "foo.h")
    check(loader, source, 4, include_dirs=[first, second])


def test_a_link_that_leads_into_itself_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link/deep")
    told: dict[str, Signature | None] = {}
    assert not look_at(f"{tmp_path}/link/foo", told)
    assert list(told) == [str(tmp_path)]


def test_spaces_that_are_not_in_ascii_belong_to_names(tmp_path: Path, loader: Loader) -> None:
    """Those that Python takes for white space too, and for the end of a line."""
    first, second = directories(tmp_path, "f\u3000\u2028i\x85rst\u00a0", "sec\u2003ond")
    write_factor(second / "foo.h", 3)
    source = write(tmp_path / "so\u3000urce" / "k.cpp")
    assert factor(loader, source, include_dirs=[first, second]) == 3
    write_factor(second / "foo.h", 4)
    check(loader, source, 4, include_dirs=[first, second])
    write_factor(first / "foo.h", 5)
    check(loader, source, 5, include_dirs=[first, second])


def test_a_file_becomes_a_directory(tmp_path: Path, loader: Loader) -> None:
    (second,) = directories(tmp_path, "second")
    first = tmp_path / "first"
    first.write_text("")
    write_factor(second / "foo.h", 3)
    source = write(tmp_path / "source" / "k.cpp")
    flags = [f"-I{first}", f"-I{second}"]
    assert factor(loader, source, cxx_flags=flags) == 3
    first.unlink()
    first.mkdir()
    write_factor(first / "foo.h", 4)
    check(loader, source, 4, cxx_flags=flags)


def test_an_include_directory_is_that_of_the_source(tmp_path: Path, loader: Loader) -> None:
    """And another is asked for later: a header in both would have the name of one."""
    source = write(tmp_path / "source" / "k.cpp")
    (other,) = directories(tmp_path, "other")
    write_factor(source.parent / "foo.h", 3)
    write_factor(other / "foo.h", 4)
    assert factor(loader, source, include_dirs=[source.parent]) == 3
    check(loader, source, 4, include_dirs=[other])


def test_an_include_directory_is_given_twice(tmp_path: Path, loader: Loader) -> None:
    source, first, second = directories(tmp_path, "source", "first", "second")
    source /= "k.cpp"
    source.write_text(f"#if __has_include(<foo.h>)\n{ASKED}")
    (second / "foo.h").write_text("")
    assert factor(loader, source, include_dirs=[first, first]) == 3
    check(loader, source, 4, include_dirs=[first, second])


def test_an_include_directory_is_inside_that_of_the_source(tmp_path: Path, loader: Loader) -> None:
    one, two = (write(tmp_path / name / "k.cpp", '"inc/foo.h"') for name in ("one", "two"))
    for source, value in ((one, 3), (two, 4)):
        directories(source.parent, "inc")
        write_factor(source.parent / "inc" / "foo.h", value)
    assert factor(loader, one, include_dirs=[one.parent / "inc"]) == 3
    check(loader, two, 4, include_dirs=[one.parent / "inc"])


def test_the_directory_of_a_flag_is_that_of_one_of_two_equal_sources(
    tmp_path: Path, loader: Loader
) -> None:
    one, two = (write(tmp_path / name / "k.cpp") for name in ("one", "two"))
    for source in (one, two):
        write_factor(source.parent / "foo.h", 3)
    flags = [f"-I{one.parent}"]
    assert factor(loader, one, cxx_flags=flags) == 3
    write_factor(one.parent / "foo.h", 4)
    check(loader, two, 4, cxx_flags=flags)


def test_a_source_is_a_copy_of_one_of_the_project(tmp_path: Path) -> None:
    project, copy = directories(tmp_path, "project", "copy")
    for place in (project, copy):
        write(place / "k.cpp", "<jq/foo.h>")
        directories(place, "include/jq")
        write_factor(place / "include" / "jq" / "foo.h", 3)
    loader = new_loader(tmp_path / "cache", kernels_dir=project)
    assert loader.get("k", ["k.cpp"]).library.factor() == 3
    write_factor(project / "include" / "jq" / "foo.h", 4)
    assert factor(loader, copy / "k.cpp") == 4


def test_a_project_in_an_environment_has_the_same_key_elsewhere(tmp_path: Path) -> None:
    """As that of ``.venv`` beside a source."""
    source = write(tmp_path / "source" / "k.cpp", '"foo.h"')
    write_factor(source.parent / "foo.h", 3)
    keys = set()
    for project in (tmp_path / "project", source.parent / "environment"):
        directories(project, "include")
        loader = new_loader(tmp_path / "cache", kernels_dir=project)
        keys.add(loader.get("k", [source]).key)
    assert len(keys) == 1


def trusted(loader: Loader, source: Path) -> None:
    """Calls until the loader trusts the files: at first they are so new that it trusts nothing."""
    assert factor(loader, source) == 3
    time.sleep(0.15)
    assert factor(loader, source) == 3


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\nexec {text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("variable", in_quick(1, ["CXX", "JITQUANT_NVCC_LAUNCHER"]))
def test_a_script_that_runs_the_compiler_is_known_by_its_contents(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    text = 'g++ -DFACTOR={} "$@"' if variable == "CXX" else '"$@" -DFACTOR={}'
    source = tmp_path / "k.cpp"
    source.write_text(FACTOR)
    one = script(tmp_path / "one" / "run", text.format(3))
    monkeypatch.setenv(variable, str(one))
    trusted(loader, source)
    script(one, text.format(4))
    check(loader, source, 4)
    monkeypatch.setenv(variable, str(script(tmp_path / "two" / "run", text.format(5))))
    check(loader, source, 5)


def test_an_edit_of_a_wrapper_of_nvcc_is_seen(
    tmp_path: Path, toolkit: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    """In a live process, and if it has the size and the time of before."""
    source = tmp_path / "k.cu"
    source.write_text(FACTOR)
    (wrapper,) = directories(tmp_path, "home/bin")
    wrapper /= "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    script(wrapper, f'"{toolkit}/bin/nvcc" -DFACTOR=3 "$@"')
    before = wrapper.stat()
    trusted(loader, source)
    script(wrapper, f'"{toolkit}/bin/nvcc" -DFACTOR=4 "$@"')
    os.utime(wrapper, ns=(before.st_atime_ns, before.st_mtime_ns))
    check(loader, source, 4)


def test_a_compiler_that_comes_first_is_found_by_a_live_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    first, second = directories(tmp_path, "first", "second")
    source = tmp_path / "k.cpp"
    source.write_text(FACTOR)
    monkeypatch.setenv("PATH", f"{first}:{second}:{os.environ['PATH']}")
    script(second / "g++", f'/usr/bin/env PATH={os.defpath} g++ -DFACTOR=3 "$@"')
    trusted(loader, source)
    script(first / "g++", f'/usr/bin/env PATH={os.defpath} g++ -DFACTOR=4 "$@"')
    check(loader, source, 4)


def test_a_binding_that_comes_is_found_by_a_live_process(
    tmp_path: Path, toolkit: Path, loader: Loader
) -> None:
    source = tmp_path / "k.cu"
    source.write_text(
        'extern "C" __attribute__((weak)) int four();\n'
        'extern "C" int factor() { return four ? 4 : 3; }\n'
    )
    trusted(loader, source)
    (tmp_path / "bindings").mkdir()
    (tmp_path / "bindings" / "k.cpp").write_text('extern "C" int four() { return 4; }\n')
    check(loader, source, 4)


@pytest.mark.parametrize("before", in_quick(1, ["link", "nothing"]))
def test_a_toolkit_that_comes_first_is_found_by_a_live_process(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    source, home = write(tmp_path / "source" / "k.cu"), tmp_path / "home"
    for value in (3, 4):
        write_factor(write_toolkit(tmp_path / str(value)) / "include" / "foo.h", value)
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "3"))
    if before == "link":
        home.symlink_to(tmp_path / "3")
    trusted(loader, source)
    (tmp_path / "new").symlink_to(tmp_path / "4")
    (tmp_path / "new").rename(home)
    check(loader, source, 4)


@pytest.mark.slow
def test_the_host_compiler_that_nvcc_is_given_is_known_by_its_contents(
    tmp_path: Path, nvcc: None, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    source = tmp_path / "k.cu"
    source.write_text(FACTOR)
    compiler = tmp_path / "bin" / "g++"
    monkeypatch.setenv("NVCC_CCBIN", str(compiler))
    for value in (3, 4):
        script(compiler, f'g++ -DFACTOR={value} "$@"')
        check(loader, source, value)


def test_what_nvcc_runs_is_known_by_its_contents(
    tmp_path: Path, toolkit: Path, loader: Loader
) -> None:
    """Parts of it come from wheels of their own, and others may come under the same nvcc."""
    nvcc = toolkit / "bin" / "nvcc"
    here, runs = (f'echo "#\\$ {what}' for what in ("_HERE_", "g++"))
    text = nvcc.read_text()
    for variable in ("CICC_PATH", "NVVMIR_LIBRARY_DIR", "PATH"):
        text = text.replace(here, f'echo "#\\$ {variable}=$root/nvvm:$PATH"\n  {here}')
    text = text.replace("=$root/nvvm:$PATH", "=$root/nvvm", 2).replace(
        runs, f"echo '#$ \"$CICC_PATH/cicc\" -O3'\n  {runs}"
    )
    nvcc.write_text(text)
    (toolkit / "nvvm").mkdir()
    parts = [toolkit / part for part in ("nvvm/cicc", "nvvm/libdevice.10.bc", "bin/nvcc.profile")]
    for part in parts:
        part.write_text("one")
    source = tmp_path / "k.cu"
    source.write_text(FACTOR.replace("FACTOR;", "3;"))
    keys = {loader.get("k", [source]).key}
    for part in parts:
        part.write_text("another")
        keys.add(loader.get("k", [source]).key)
    assert len(keys) == 4


SWITCHED = """extern "C" int three() { return 3; }
extern "C" int four() { return 4; }
asm(".globl factor\\n.ifdef FOUR\\n.set factor, four\\n.else\\n.set factor, three\\n.endif");
"""


@pytest.mark.parametrize("way", in_quick(1, ["COMPILER_PATH", "-B"]))
def test_what_the_compiler_runs_is_known_by_its_contents(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    """An assembler that was not there before, and another one."""
    first, second = directories(tmp_path, "first", "second")
    source = tmp_path / "k.cpp"
    source.write_text(SWITCHED)
    flags = []
    if way == "-B":
        flags = [f"-B{first}", f"-B{second}"]
    else:
        monkeypatch.setenv(way, f"{first}:{second}")
    for value, place, more in ((3, second, ""), (4, second, " --defsym FOUR=1"), (3, first, "")):
        script(place / "as", f'as{more} "$@"')
        check(loader, source, value, cxx_flags=flags)


def test_what_specs_include_is_known_by_its_contents(tmp_path: Path, loader: Loader) -> None:
    source = tmp_path / "k.cpp"
    source.write_text(FACTOR)
    (tmp_path / "outer").write_text(f"%include <{tmp_path}/inner>\n")
    for value in (3, 4):
        (tmp_path / "inner").write_text(f"*cpp:\n+ -DFACTOR={value}\n")
        check(loader, source, value, cxx_flags=[f"-specs={tmp_path}/outer"])


@pytest.mark.slow
def test_a_compiler_that_nvcc_finds_on_path_is_known_by_its_contents(
    tmp_path: Path, nvcc: None, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    source = tmp_path / "k.cu"
    source.write_text(FACTOR)
    monkeypatch.setenv("NVCC_CCBIN", "other-g++")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for value in (3, 4):
        script(tmp_path / "bin" / "other-g++", f'g++ -DFACTOR={value} "$@"')
        check(loader, source, value)


def test_the_date_that_a_variable_sets_belongs_to_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    source = tmp_path / "k.cpp"
    source.write_text("extern \"C\" int factor() { return __DATE__[5] - '0'; }\n")
    for day in (3, 4):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", f"{86400 * (day - 1)}")
        check(loader, source, day)


@pytest.mark.parametrize("way", in_quick(1, ["flag", "response file", "CXX"]))
def test_what_is_compiled_for_this_processor_is_not_for_another(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    """As in a home directory that machines share."""
    source, file = write(tmp_path / "k.cpp"), tmp_path / "file"
    file.write_text("-march=native")
    flags = {"flag": ["-mtune=native"], "response file": [f"@{file}"]}.get(way, [])
    if way == "CXX":
        monkeypatch.setenv("CXX", "g++ -march=native")
    keys = set()
    for cpu in ("one", "another"):
        monkeypatch.setattr(plan_module, "_this_cpu", lambda cpu=cpu: cpu)
        request = Request("k", (source,), cxx_flags=tuple(flags))
        keys.add(loader.plan(loader.look_up(request)).level1)
    assert len(keys) == 2


def test_a_compiler_that_does_not_say_where_it_searches_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    source = tmp_path / "k.cpp"
    source.write_text(FACTOR.replace("FACTOR;", "3;"))
    mute = tmp_path / "g++"
    mute.write_text('#!/bin/sh\ncase "$*" in *"-E -v -x c++"*) exit 1;; esac\nexec g++ "$@"\n')
    mute.chmod(0o755)
    monkeypatch.setenv("CXX", str(mute))
    with pytest.raises(CompileError, match="does not say where it searches for headers, as GCC"):
        loader.get("k", [source])


@pytest.mark.parametrize("name", in_quick(1, ["INCLUDES", "SYSTEM_INCLUDES"]))
def test_what_nvcc_reads_from_the_environment_belongs_to_the_key(
    name: str, tmp_path: Path, nvcc: None, monkeypatch: pytest.MonkeyPatch, loader: Loader
) -> None:
    """nvcc.profile adds to these."""
    source = write(tmp_path / "k.cu")
    for value, place in enumerate(directories(tmp_path, "one", "two"), 3):
        write_factor(place / "foo.h", value)
        monkeypatch.setenv(name, f'"-I{place}"')
        check(loader, source, value)


def linked(source: Path, first: Path, second: Path) -> Callable[[int], None]:
    source.write_text('extern "C" int part();\nextern "C" int factor() { return part(); }\n')
    archive(second, 3)
    return lambda value: archive(first, value) and None


@pytest.mark.parametrize(
    "flags",
    in_quick(
        2,
        [
            ["-L", "{}/place", "-l", "script"],
            ["-L{}/place", "-lthin"],
            ["-Wl,{}/place/libthin.a"],
            ["-L{}/place", "-L{}/part", "-Wl,--library=names"],
            ["-L{}/place", "-Wl,-T,{}/place/first.ld"],
            ["-Xlinker", "--library-path", "-Xlinker", "{}/part", "-Xlinker", "--library=part"],
        ],
    ),
)
def test_what_the_linker_reads_is_known_by_its_contents(
    flags: list[str], tmp_path: Path, loader: Loader
) -> None:
    source = tmp_path / "k.cpp"
    source.write_text('extern "C" int part();\nextern "C" int factor() { return part(); }\n')
    (place,) = directories(tmp_path, "place")
    archive(tmp_path / "part", 3)
    (place / "libscript.so").write_text(f"INPUT({tmp_path}/part/libpart.a)\n")
    (place / "libnames.so").write_text("INPUT(-lpart)\n")
    (place / "first.ld").write_text("INCLUDE second.ld\nINSERT AFTER .text;\n")
    (place / "second.ld").write_text(f"INPUT({tmp_path}/part/libpart.a)\n")
    thin = [str(place / "libthin.a"), str(tmp_path / "part" / "part.o")]
    subprocess.run(["ar", "rcsT", *thin], check=True)
    for value in (3, 4):
        archive(tmp_path / "part", value)
        check(loader, source, value, cxx_flags=[flag.format(tmp_path) for flag in flags])


def assembled(source: Path, first: Path, second: Path) -> Callable[[int], None]:
    incbin(source, Path("data.bin"))
    (second / "data.bin").write_bytes(b"\x03")
    return lambda value: (first / "data.bin").write_bytes(bytes([value])) and None


@pytest.mark.parametrize(
    ("prepare", "flags"), [(linked, ["-lpart"]), (assembled, ["-Wa,-I{0}/first,-I{0}/second"])]
)
def test_the_directories_of_linker_and_assembler_are_searched_in_order(
    prepare: Callable[[Path, Path, Path], Callable[[int], None]],
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    loader: Loader,
) -> None:
    first, second = directories(tmp_path, "first", "second")
    monkeypatch.setenv("LIBRARY_PATH", f"{first}:{second}")
    source = tmp_path / "k.cpp"
    shadow = prepare(source, first, second)
    flags = [flag.format(tmp_path) for flag in flags]
    assert factor(loader, source, cxx_flags=flags) == 3
    shadow(4)
    check(loader, source, 4, cxx_flags=flags)
