"""What is raised when a compiler, the linker or the first load fails."""

from __future__ import annotations

import pickle
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from jitquant.loader import CompileError, Diagnostic, Loader, LoaderError
from jitquant.loader.compile.advice import advice
from jitquant.loader.diagnostics import excerpt, hints, parse

from .toys import entries, litter, write_plain, write_toy


def compile_error(loader: Loader, source: Path, **arguments: object) -> CompileError:
    with pytest.raises(CompileError) as caught:
        loader.get("broken", [source], **arguments)  # type: ignore[arg-type]
    return caught.value


def test_error_in_a_kernel(loader: Loader, tmp_path: Path, nvcc: None) -> None:
    source = write_toy(tmp_path / "source")
    source.write_text(source.read_text() + "\n__global__ void bad(float* x) {\n  x[0] = yy;\n}\n")
    line = source.read_text().splitlines().index("  x[0] = yy;") + 1
    error = compile_error(loader, source)
    assert error.diagnostics[0] == Diagnostic(
        str(source), line, 10, "error", 'identifier "yy" is undefined'
    )
    text = str(error)
    assert f'{source}:{line}: error: identifier "yy" is undefined' in text
    assert f"{line:6d} |   x[0] = yy;\n" in text
    assert " |          ^" in text
    assert text.count("command: ") == 1
    assert shlex.split(text.split("command: ")[1].splitlines()[0]) == list(error.command)
    assert "g++" not in text.split("\n")[0]
    assert error.log_path is not None
    assert 'identifier "yy"' in error.log_path.read_text()
    assert str(error.log_path) in text
    # The command is one that can be run again by hand.
    again = subprocess.run(error.command, cwd=tmp_path, capture_output=True, check=False)
    assert b'identifier "yy"' in again.stdout + again.stderr


def test_error_in_a_binding_is_the_hosts_alone(loader: Loader, tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source")
    source.write_text(source.read_text() + "int f() { return missing; }\n")
    error = compile_error(loader, source)
    (first,) = [d for d in error.diagnostics if d.is_error]
    assert (first.file, first.line, first.column) == (str(source), 4, 18)
    assert "'missing' was not declared" in first.message
    assert "     4 | int f() { return missing; }\n       |                  ^" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.diagnostics, copy.command) == (error.diagnostics, error.command)
    assert litter(tmp_path / "cache") == []
    assert entries(tmp_path / "cache") == []


def test_missing_header(loader: Loader, tmp_path: Path, nvcc: None) -> None:
    source = write_toy(tmp_path / "source")
    source.with_suffix(".cuh").unlink()
    error = compile_error(loader, source)
    assert error.diagnostics[0].severity == "fatal error"
    assert "toy.cuh: No such file" in error.diagnostics[0].message


def test_error_of_ptxas(loader: Loader, tmp_path: Path, nvcc: None) -> None:
    source = tmp_path / "broken.cu"
    source.write_text(
        "__global__ void big(float* o) {\n  __shared__ float a[100000];\n"
        "  a[threadIdx.x] = o[3];\n  __syncthreads();\n  o[threadIdx.x] = a[threadIdx.x + 1];\n}\n"
    )
    error = compile_error(loader, source)
    assert "ptxas: Entry function '_Z3bigPf' uses too much shared data" in str(error)


def test_a_line_of_a_file_whose_name_cannot_be_written_is_not_shown(tmp_path: Path) -> None:
    assert excerpt(Diagnostic("\ud800.cu", 1, 1, "error", "no"), tmp_path) == ""


def test_error_of_nvcc_itself(loader: Loader, tmp_path: Path, nvcc: None) -> None:
    error = compile_error(loader, write_toy(tmp_path / "source"), cuda_flags=["--bogus"])
    assert "nvcc: Unknown option '--bogus'" in str(error)


def test_error_of_the_linker(loader: Loader, tmp_path: Path) -> None:
    error = compile_error(loader, write_plain(tmp_path / "source"), cxx_flags=["-lno_such_library"])
    assert "linking" in str(error)
    assert "cannot find -lno_such_library" in str(error)
    other = tmp_path / "other.cpp"
    other.write_text('extern "C" int factor() { return 1; }\n')
    with pytest.raises(CompileError, match="linker: multiple definition of `factor'"):
        loader.get("broken", [write_plain(tmp_path / "source"), other])


def test_error_of_the_linker_has_its_cause_and_its_command(loader: Loader, tmp_path: Path) -> None:
    error = compile_error(loader, write_plain(tmp_path / "source"), cxx_flags=["-Wl,-bogus"])
    assert "error: linker: invalid BFD target `ogus'" in str(error)
    assert {"-shared", "o0.o", "-Wl,-bogus"} <= set(error.command)
    assert shlex.join(error.command) in str(error)
    assert "ninja -v" not in str(error)
    assert error.log_path is not None
    assert shlex.join(error.command) in error.log_path.read_text()


def test_undefined_symbol(loader: Loader, tmp_path: Path) -> None:
    source = tmp_path / "k.cpp"
    source.write_text("void absent();\nstruct A { A() { absent(); } } a;\n")
    with pytest.raises(LoaderError, match="undefined symbol: _Z6absentv") as caught:
        loader.get("k", [source])
    assert "no source of this module defines it" in str(caught.value)
    if shutil.which("c++filt"):
        assert "\nabsent() is declared" in str(caught.value)
    assert entries(tmp_path / "cache") == []


def test_a_file_system_where_nothing_may_be_executed() -> None:
    said = "k.so: failed to map segment from shared object: Operation not permitted"
    assert "noexec. Set JITQUANT_CACHE_DIR" in advice(said, [])


def test_library_that_throws_while_it_is_loaded_does_not_end_the_process(
    loader: Loader, tmp_path: Path
) -> None:
    source = tmp_path / "k.cpp"
    source.write_text(
        '#include <stdexcept>\nstruct A { A() { throw std::runtime_error("boom"); } } a;\n'
    )
    with pytest.raises(LoaderError, match=r"(?s)got SIGABRT.*what\(\):  boom"):
        loader.get("k", [source])
    # A fault, which no mask of signals holds back as it does one that is raised.
    source.write_text("int* volatile nowhere;\nstruct A { A() { *nowhere = 1; } } a;\n")
    with pytest.raises(LoaderError, match="got SIGSEGV"):
        loader.get("k", [source])
    assert litter(tmp_path / "cache") == []


def test_wrong_schema_is_shown(loader: Loader, tmp_path: Path) -> None:
    source = tmp_path / "k.cpp"
    source.write_text(
        "#include <torch/csrc/stable/library.h>\n"
        'STABLE_TORCH_LIBRARY(TORCH_EXTENSION_NAME, m) { m.def("f(Tensr x) -> Tensor"); }\n'
    )
    with pytest.raises(LoaderError, match="schema is not valid") as caught:
        loader.get("k", [source])
    assert "f(Tensr x) -> Tensor" in str(caught.value)
    assert "unknown type specifier" in str(caught.value)


def test_error_is_raised_again_and_goes_away_with_its_cause(loader: Loader, tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source")
    good = source.read_text()
    module = loader.get("broken", [source])
    source.write_text("no C++ at all\n")
    compile_error(loader, source)
    compile_error(loader, source)
    assert module.library.factor() == 3
    source.write_text(good)
    assert loader.get("broken", [source]) is module


def test_number_of_logs_is_bounded(loader: Loader, tmp_path: Path) -> None:
    cache = loader.cache()
    cache.prepare()
    for index in range(60):
        assert cache.write_log("k", str(index)) is not None
    assert len(list((cache.base / "logs").iterdir())) == 40


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a b.cu(3): error: x", ("a b.cu", 3, None, "error", "x")),
        ("a.cu(3): error #20-D: x", ("a.cu", 3, None, "error", "x")),
        (
            "a.cu(12): warning #177-D: v was declared",
            ("a.cu", 12, None, "warning", "v was declared"),
        ),
        ("a.cu(1): catastrophic error: x", ("a.cu", 1, None, "error", "x")),
        ("/p/a.h:3:14: fatal error: q.h: No", ("/p/a.h", 3, 14, "fatal error", "q.h: No")),
        ("a.h:3: warning: w", ("a.h", 3, None, "warning", "w")),
        ("ptxas fatal   : aborted", ("", 0, None, "error", "ptxas: aborted")),
        (
            "ptxas /t/k.ptx, line 24; error   : Unknown modifier '.bar'",
            ("", 0, None, "error", "ptxas: Unknown modifier '.bar' (line 24 of the PTX)"),
        ),
        ("nvcc fatal   : Unsupported", ("", 0, None, "error", "nvcc: Unsupported")),
        (
            "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
            ("", 0, None, "error", "nvcc: 'cicc' died due to signal 9 (Kill signal)"),
        ),
        ("/usr/bin/ld: cannot find -lx: No", ("", 0, None, "error", "linker: cannot find -lx: No")),
        ("aarch64-linux-gnu-ld.bfd: bad -z", ("", 0, None, "error", "linker: bad -z")),
        ("ld.lld: error: unknown x", ("", 0, None, "error", "linker: error: unknown x")),
        ("/opt/x/mold: fatal: no x", ("", 0, None, "error", "linker: fatal: no x")),
        ("ld: warning: no .note", ("", 0, None, "warning", "linker: warning: no .note")),
        (
            "/usr/bin/ld: skipping incompatible /l/libx.so when searching for -lx",
            (
                *("", 0, None, "warning"),
                "linker: skipping incompatible /l/libx.so when searching for -lx",
            ),
        ),
    ],
)
def test_lines_of_compilers(
    line: str, expected: tuple[str, int, int | None, str, str], tmp_path: Path
) -> None:
    assert parse(f"noise\n{line}\n1 error detected\n", tmp_path) == [Diagnostic(*expected)]


def test_excerpt_of_a_file_that_is_gone_is_empty(tmp_path: Path) -> None:
    assert excerpt(Diagnostic("gone.cu", 3, 1, "error", "x"), tmp_path) == ""
    assert excerpt(Diagnostic("", 0, None, "error", "x"), tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "code", "hint"),
    [
        ("nvcc error : 'cicc' died due to signal 9 (Kill signal)", 9, "JITQUANT_JOBS=1"),
        ("", 137, "memory ran out"),
        ("", -9, "memory ran out"),
        ("#error -- unsupported GNU version! gcc 15", 1, "CXX=g++-13"),
        ("c10/cuda/CUDAMacros.h: No such file", 1, "CUDA build of torch"),
        (
            "k.cu(2): error: this declaration has no storage class or type specifier\n"
            '  JITQUANT_EXPORT(launch_a, "a(Tensor(a!) x) -> ()")\n  ^',
            2,
            '#include "jitquant/export.h"',
        ),
    ],
)
def test_hints(text: str, code: int, hint: str) -> None:
    assert hint in "\n".join(hints(text, code))


def test_that_nvrtc_compiles_no_host_code_is_said_where_it_may_be_the_cause() -> None:
    assert hints('k.cu(1): error: identifier "cudaMalloc" is undefined', 6, ["nvrtc"])
    assert not hints('k.cu(1): error: expected a ";"', 6, ["nvrtc"])
    assert not hints("nvrtc: error: unrecognized option -O3 found", 5, ["nvrtc"])


@pytest.mark.parametrize("flags", [["-Iinc"], ["-I", "inc"], ["-isystem", "inc"]])
def test_a_relative_directory_in_the_flags_is_named(
    flags: list[str], loader: Loader, tmp_path: Path
) -> None:
    source = tmp_path / "k.cpp"
    source.write_text("#include <foo.h>\n")
    absolute = ["-I", str(tmp_path)]
    with pytest.raises(CompileError, match=rf"{' ?'.join(flags)} is relative to the directory"):
        loader.get("k", [source], cxx_flags=[*absolute, *flags])
    with pytest.raises(CompileError) as caught:
        loader.get("k", [source], cxx_flags=absolute)
    assert "is relative" not in str(caught.value)


def test_compiler_that_is_killed_says_out_of_memory(
    loader: Loader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "bin" / "killed-g++"
    wrapper.parent.mkdir()
    wrapper.write_text('#!/bin/sh\ncase "$*" in *-c*) kill -9 $$;; *) exec g++ "$@";; esac\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    error = compile_error(loader, write_plain(tmp_path / "source"))
    assert "killed by signal 9" in str(error)
    assert "memory ran out" in str(error)
