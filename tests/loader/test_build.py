"""Builds with nvcc: what comes out, and that odd but legal inputs work."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from jitquant.loader import CudaModule, Loader

from .conftest import Toy
from .toys import entries, finish, litter, new_loader, python, write_factor, write_plain, write_toy

X = torch.arange(3, dtype=torch.float32)


def test_functions_of_a_module(toy: Toy) -> None:
    module = toy.module
    assert isinstance(module, CudaModule)
    assert torch.equal(module.scale(X, 2.0), X * 6)
    assert torch.equal(module.scale.default(X, 2.0), X * 6)
    assert "scale" in dir(module)
    assert module.archs == ("90a",)
    assert repr(module).startswith("<CudaModule 'toy' (sm_90a) key ")
    assert str(module.path) in repr(module)
    with pytest.raises(AttributeError, match=r"no attribute 'scales'\. Did you mean 'scale'\?"):
        _ = module.scales
    with pytest.raises(TypeError, match="cannot be pickled; call get_cuda_module"):
        pickle.dumps(module)


def test_start_line_names_module_architectures_and_reason(toy: Toy) -> None:
    assert "building toy for sm_90a: first build" in toy.said
    assert "no GPU is visible: compiling for sm_90a" in toy.said


def test_header_of_a_kernel_edited_in_a_live_process_and_then_a_new_one(
    toy: Toy, tmp_path: Path
) -> None:
    source, cache = toy.copy(tmp_path)
    loader = new_loader(cache)
    old = loader.get("toy", [source])
    write_factor(source.with_suffix(".cuh"), 4)
    new = loader.get("toy", [source])
    assert torch.equal(old.scale(X, 1.0), X * 3)
    assert torch.equal(new.scale(X, 1.0), X * 4)
    out, err = finish(
        python(
            f"""
            import torch
            from pathlib import Path
            from jitquant.loader import get_cuda_module
            module = get_cuda_module("toy", [Path({str(source)!r})])
            print(module.scale(torch.ones(1), 1.0).item())
            """,
            cache,
            CUDA_VISIBLE_DEVICES="",
        )
    )
    assert (out.strip(), err) == ("4.0", "")


@pytest.mark.slow
def test_equal_file_names_in_two_directories(tmp_path: Path, loader: Loader, nvcc: None) -> None:
    first = write_toy(tmp_path / "a", 5)
    second = write_toy(tmp_path / "b", 7)
    second.write_text(
        second.read_text().replace("toy_factor", "other_factor").replace("multiply", "times")
    )
    (second.parent / "bindings" / "toy.cpp").unlink()
    binding = first.parent / "bindings" / "toy.cpp"
    binding.write_text(
        binding.read_text()
        .replace("int toy_factor();", "int toy_factor();\nint other_factor();")
        .replace("* toy_factor()", "* toy_factor() * other_factor()")
    )
    # "toy.cuh" beside each: the quote form finds the one of its own directory.
    module = loader.get("both", [first, second])
    assert torch.equal(module.scale(X, 1.0), X * 35)
    write_factor(second.parent / "toy.cuh", 2)
    assert torch.equal(loader.get("both", [first, second]).scale(X, 1.0), X * 10)


def test_the_longest_name_of_a_source(tmp_path: Path, loader: Loader) -> None:
    source = write_plain(tmp_path)
    source = source.rename(source.with_name(f"{'a' * 251}.cpp"))
    assert loader.get("k", [source]).library.factor() == 3


@pytest.mark.slow
def test_spaces_and_unicode_in_every_path(tmp_path: Path, nvcc: None) -> None:
    source = write_toy(tmp_path / "mit Leerzeichen" / "üñí (1)#'", 6, stem="toy")
    loader = new_loader(tmp_path / "Zwischen lager é $x")
    module = loader.get("toy", [source])
    assert torch.equal(module.scale(X, 1.0), X * 6)
    write_factor(source.with_suffix(".cuh"), 8)
    assert torch.equal(loader.get("toy", [source]).scale(X, 1.0), X * 8)
    assert litter(tmp_path / "Zwischen lager é $x") == []


@pytest.mark.slow
def test_several_architectures_and_ptx(tmp_path: Path, nvcc: None) -> None:
    source = write_toy(tmp_path / "source")
    loader = new_loader(tmp_path / "cache")
    module = loader.get("toy", [source], archs="8.0+PTX;9.0;10.0f", cuda_flags=["-DSEARCH=1"])
    assert module.archs == ("80+ptx", "90a", "100f")
    binary = module.path.read_bytes()
    assert torch.equal(module.scale(X, 1.0), X * 3)
    assert len(binary) > 0


def test_projects_headers_are_found_from_a_source_of_the_caller(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels_cu"
    (kernels / "include" / "mine").mkdir(parents=True)
    write_factor(kernels / "include" / "mine" / "plain.h", 9)
    source = write_plain(tmp_path / "elsewhere")
    source.with_suffix(".h").unlink()
    source.write_text(source.read_text().replace('"plain.h"', '"mine/plain.h"'))
    loader = new_loader(tmp_path / "cache", kernels_dir=kernels)
    assert loader.get("plain", [source]).library.factor() == 9
    write_factor(kernels / "include" / "mine" / "plain.h", 2)
    assert loader.get("plain", [source]).library.factor() == 2


def test_headers_of_another_folder_have_one_name(tmp_path: Path) -> None:
    kernels = tmp_path / "kernels_cu"
    for room in ("first", "second"):
        (kernels / room).mkdir(parents=True)
    (kernels / "first" / "plain.cpp").write_text(
        '#include "../second/more.h"\nextern "C" int factor() { return FACTOR; }\n'
    )
    (kernels / "second" / "more.h").write_text('#include "../second/plain.h"\n')
    (kernels / "second" / "plain.h").write_text('#include "../second/more.h"\n#define FACTOR 9\n')
    for header in ("more.h", "plain.h"):
        path = kernels / "second" / header
        path.write_text("#pragma once\n" + path.read_text())
    loader = new_loader(tmp_path / "cache", kernels_dir=kernels)
    assert loader.get("plain", ["plain.cpp"]).library.factor() == 9
    (entry,) = entries(tmp_path / "cache")
    read = json.loads((entry / "entry.json").read_text())["headers"]
    assert {name for name in read if not name.startswith("=")} >= {
        "lib/second/more.h",
        "lib/second/plain.h",
    }
    assert not any("first/.." in name for name in read)
    write_factor(kernels / "second" / "plain.h", 2)
    assert loader.get("plain", ["plain.cpp"]).library.factor() == 2


@pytest.mark.parametrize(
    "flags",
    [["-Wl,-soname,odd name.so"], ["-Xlinker", "-soname", "-Xlinker", "odd name.so"]],
)
def test_linker_flags_reach_the_linker(tmp_path: Path, loader: Loader, flags: list[str]) -> None:
    source = tmp_path / "z.cpp"
    source.write_text('extern "C" int factor() { return 1; }\n')
    module = loader.get("z", [source], cxx_flags=[*flags, "-lm"])
    assert b"odd name.so" in module.path.read_bytes()


PYBIND = """
#include <Python.h>
static PyObject* answer(PyObject*, PyObject*) {{ return PyLong_FromLong({value}); }}
static PyMethodDef methods[] = {{{{"answer", answer, METH_NOARGS, ""}}, {{0, 0, 0, 0}}}};
static PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "m", "", -1, methods, 0, 0, 0, 0}};
#define CONCATENATE(a, b) a##b
#define INIT(name) CONCATENATE(PyInit_, name)
PyMODINIT_FUNC INIT({name})(void) {{ return PyModule_Create(&definition); }}
"""


@pytest.mark.parametrize("name", ["TORCH_EXTENSION_NAME", "a_fixed_name"])
def test_python_extension_module(tmp_path: Path, loader: Loader, name: str) -> None:
    source = tmp_path / "ext.cpp"
    for value in (1, 2):
        source.write_text(PYBIND.format(name=name, value=value))
        module = loader.get("ext", [source])
        assert module.answer() == value
        assert "answer" in dir(module)
    # Modules with Python's own API are bound to its ABI.
    texts = [(directory / "entry.json").read_text() for directory in entries(tmp_path / "cache")]
    assert all('"python_abi": "cpython-' in text for text in texts)


FIXED = """
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
int64_t answer(int64_t x) {{ return x + {value}; }}
STABLE_TORCH_LIBRARY({name}, m) {{ m.def("answer(int x) -> int"); }}
STABLE_TORCH_LIBRARY_IMPL({name}, CompositeExplicitAutograd, m) {{
  m.impl("answer", TORCH_BOX(&answer));
}}
"""


@pytest.mark.slow
def test_fixed_namespace_works_once_and_its_second_version_is_an_error(
    tmp_path: Path, loader: Loader
) -> None:
    from jitquant.loader import LoaderError

    source = tmp_path / "fixed.cpp"
    source.write_text(FIXED.format(name="jitquant_fixed_ns", value=1))
    module = loader.get("fixed", [source])
    assert module.answer(1) == 2
    assert torch.ops.jitquant_fixed_ns.answer(1) == 2
    source.write_text(FIXED.format(name="jitquant_fixed_ns", value=2))
    with pytest.raises(LoaderError, match="does not load") as caught:
        loader.get("fixed", [source])
    assert "Use the macro TORCH_EXTENSION_NAME" in str(caught.value)
    assert module.answer(1) == 2
    # Another process builds and uses the second version; this one still cannot load it.
    code = f"""
        from pathlib import Path
        from jitquant.loader import get_cuda_module
        print(get_cuda_module("fixed", [Path({str(source)!r})]).answer(1))
        """
    out, _ = finish(python(code, tmp_path / "cache"))
    assert out.strip() == "3"
    with pytest.raises(LoaderError, match="Use the macro TORCH_EXTENSION_NAME"):
        loader.get("fixed", [source])
    source.write_text(FIXED.format(name="TORCH_EXTENSION_NAME", value=3))
    assert loader.get("fixed", [source]).answer(1) == 4


@pytest.mark.slow
def test_quiet_silences_the_warnings_of_compilers_too(tmp_path: Path) -> None:
    source = write_plain(tmp_path / "source")
    source.write_text('#warning "look here"\n' + source.read_text())
    code = f"""
        from pathlib import Path
        from jitquant.loader import get_cuda_module
        get_cuda_module("plain", [Path({str(source)!r})])
        """
    _, said = finish(python(code, tmp_path / "loud"))
    assert "g++ plain.cpp said:" in said
    assert "look here" in said
    assert finish(python(code, tmp_path / "quiet", JITQUANT_QUIET="1")) == ("", "")


def test_a_name_that_is_no_setting_is_named_once_at_the_first_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JITQUANT_CACHEDIR", "/nowhere")
    monkeypatch.setenv("JITQUANT_PYTHON", "python3")  # that of scripts/test
    source = write_plain(tmp_path / "source")
    loader = new_loader(tmp_path / "cache")
    for value in (3, 4):
        write_factor(source.with_suffix(".h"), value)
        loader.get("plain", [source])
    said = [line for line in capfd.readouterr().err.splitlines() if "not a setting" in line]
    assert said == [
        "jitquant: JITQUANT_CACHEDIR is not a setting and is ignored. JITQUANT_CACHE_DIR is meant?"
    ]
