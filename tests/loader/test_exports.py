"""JITQUANT_EXPORT: a kernel, its launcher and its operator in one file."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

import pytest
import torch

from jitquant.loader import CompileError, CudaModule, Loader
from jitquant.loader.compile.commands import make_units
from jitquant.loader.machine.memo import Memo
from jitquant.loader.machine.toolchain import find_nvcc
from jitquant.loader.request.exports import find_binding
from jitquant.loader.request.plan import Request

from .toys import entries, finish, new_loader, nvcc_or_reason, python, write_toy

SCALE = """
#include "jitquant/export.h"

__global__ void scale_kernel(const float* x, float s, float* out, int64_t n) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < n) out[i] = x[i] * s;
}

namespace mine {
// JITQUANT_EXPORT(commented, "out()")
cudaError_t launch_scale(const jitquant::TensorView& x, float s, const jitquant::TensorView& out,
                         cudaStream_t stream) {
  const float* from = x.contiguous().data<const float>();
  float* to = out.with_shape_of(x).contiguous().data<float>();
  const int64_t n = x.numel();
  if (n == 0) return cudaSuccess;
  scale_kernel<<<static_cast<unsigned>((n + 255) / 256), 256, 0, stream>>>(from, s, to, n);
  return cudaGetLastError();
}

JITQUANT_EXPORT(launch_scale,
                "scale(Tensor x, float s, *, "
                "Tensor(a!) out) -> ()")
}  // namespace mine

cudaError_t launch_fill(float* out, int32_t n, const char* how, const float* bias,
                        std::optional<double> value, bool twice, cudaStream_t) noexcept {
  return out == nullptr || n < 0 || twice ? cudaErrorInvalidValue : cudaSuccess;
}
JITQUANT_EXPORT(launch_fill, R"(fill(Tensor(a!) out, int n, str how="zero", Tensor? bias=None,
  float? value=None, bool twice=False) -> ())")

#if 0
JITQUANT_EXPORT(launch_absent, "absent(Tensor x) -> ()")
#endif
"""
LINE = SCALE[: SCALE.index("JITQUANT_EXPORT(launch_scale")].count("\n") + 1


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[CudaModule, Path]:
    """The module of SCALE for sm_90a, and the cache that it is in."""
    reason = nvcc_or_reason()
    if reason is not None:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("export")
    source = directory / "scale.cu"
    source.write_text(SCALE)
    cache = directory / "cache"
    return new_loader(cache).get("scale", [source], archs="90a"), cache


def test_one_file_gives_a_module(built: tuple[CudaModule, Path]) -> None:
    module, _ = built
    assert [n for n in dir(module) if n in ("scale", "fill", "absent")] == ["fill", "scale"]
    text = str(module.scale.default._schema)
    assert text.endswith("::scale(Tensor x, float s, *, Tensor(a!) out) -> ()")
    arguments = module.fill.default._schema.arguments
    assert [a.name for a in arguments] == ["out", "n", "how", "bias", "value", "twice"]
    assert arguments[2].default_value == "zero"


def test_a_tensor_on_the_cpu_is_refused_by_name(built: tuple[CudaModule, Path]) -> None:
    module, _ = built
    x = torch.ones(3)
    with pytest.raises(
        RuntimeError, match=r"scale: x: expected a tensor on cuda, .*\.to\('cuda'\)"
    ):
        module.scale(x, 2.0, out=torch.empty(3))


def test_it_can_be_traced(built: tuple[CudaModule, Path]) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    module, _ = built
    x = torch.ones(3, device="meta")
    assert module.scale(x, 2.0, out=torch.empty_like(x)) is None
    with FakeTensorMode():
        x = torch.empty(3, device="cpu")
        assert module.scale(x, 2.0, out=torch.empty_like(x)) is None


def test_the_binding_is_kept_with_the_build(built: tuple[CudaModule, Path]) -> None:
    module, cache = built
    (entry,) = entries(cache)
    text = (entry / "scale.export.cpp").read_text()
    assert f'#line {LINE} "' in text
    assert "jitquant_export_launch_scale" in text
    assert module.path.parent == entry
    assert '"binding_generator"' in (entry / "entry.json").read_text()


def test_the_generator_belongs_to_the_key(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jitquant.loader.machine.memo import Memo
    from jitquant.loader.request import exports, plan

    source = tmp_path / "scale.cu"
    source.write_text(SCALE)

    def inputs() -> dict[str, object]:
        request = plan.Request("scale", (source,), archs="90a")
        wanted = plan.look_up(
            request, kernels_dir=loader.kernels_dir(), memo=Memo(), choose=loader.choose
        )
        return wanted.inputs

    before = inputs()
    other = tmp_path / "other_generator.py"
    other.write_text("")
    monkeypatch.setattr(exports, "generator_file", lambda: str(other))
    assert inputs() != before
    source.write_text("// nothing exported\n")
    assert "binding_generator" not in inputs()


def test_the_directory_may_have_any_name(tmp_path: Path, nvcc: None, loader: Loader) -> None:
    source = tmp_path / os.fsdecode(b"b\xffd") / "scale.cu"
    source.parent.mkdir()
    source.write_text(SCALE)
    plan = loader.plan(loader.look_up(Request("scale", (source,), archs="90a")))
    make_units(plan, "scale", tmp_path)
    assert os.fsencode(source) in (tmp_path / "scale.export.cpp").read_bytes()


def test_a_second_process_only_loads_it(built: tuple[CudaModule, Path], tmp_path: Path) -> None:
    module, cache = built
    source = tmp_path / "elsewhere" / "scale.cu"
    source.parent.mkdir()
    source.write_text(SCALE)
    code = f"""
        from pathlib import Path
        from jitquant.loader import get_cuda_module
        print(get_cuda_module("scale", [Path({str(source)!r})], archs="90a").key)
        """
    out, err = finish(python(code, cache))
    assert (out.strip(), err) == (module.key, "")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('JITQUANT_EXPORT(f, "f(Tensr x) -> ()")', "schema is not valid: .*unknown type"),
        ('JITQUANT_EXPORT(f, "f(Tensor x -> ()")', "schema is not valid"),
        ('JITQUANT_EXPORT(f, "f(Tensor x) -> Tensor")', r"returns something.*'Tensor\(a!\) out'"),
        ('JITQUANT_EXPORT(f, "a::f(Tensor x) -> ()")', "has a namespace; leave it out"),
        ('JITQUANT_EXPORT(f, "f(int n) -> ()")', "no Tensor argument"),
        ('JITQUANT_EXPORT(f, "f(Tensor x, int[] n) -> ()")', r"'n' has type List\[int\]; support"),
        ("JITQUANT_EXPORT(f, SCHEMA)", "has to be a string literal"),
        ('JITQUANT_EXPORT(f, "f(Tensor x)" " -> ()"', "has to be a string literal"),
        ('JITQUANT_EXPORT(a::f, "f(Tensor x) -> ()")', "qualified name"),
        ('JITQUANT_EXPORT("f(Tensor x) -> ()")', "name of a launcher has to follow"),
        ('JITQUANT_EXPORT(f "f(Tensor x) -> ()")', "comma has to follow f"),
        (
            'JITQUANT_EXPORT(g, "g(Tensor x) -> ()")\nJITQUANT_EXPORT(f, "g(Tensor x) -> ()")',
            "operator 'g' is defined on line 4 already",
        ),
        (
            'JITQUANT_EXPORT(f, "g(Tensor x) -> ()")\nJITQUANT_EXPORT(f, "f(Tensor x) -> ()")',
            "f is exported on line 4 already",
        ),
        (
            f'JITQUANT_EXPORT(f, "f(Tensor x, {", ".join(f"int a{i}" for i in range(24))}) -> ()")',
            "25 arguments; at most 24",
        ),
    ],
)
def test_slips_in_the_macro_name_file_and_line(
    tmp_path: Path, loader: Loader, text: str, said: str
) -> None:
    source = tmp_path / "bad.cu"
    source.write_text(f'\n/* a comment\n with "quotes */\n{text}\n')
    line = source.read_text().count("\n")
    with pytest.raises(CompileError, match=re.compile(said, re.S)) as caught:
        find_binding("bad", str(source))
    (found,) = caught.value.diagnostics
    assert (found.file, found.line, found.column) == (str(source), line, 1)
    assert f"{source}:{line}: error: JITQUANT_EXPORT: " in str(caught.value)
    assert f"{line:6d} | JITQUANT_EXPORT(" in str(caught.value)


@pytest.mark.parametrize("how", ["header", "macro", "source"])
def test_a_macro_that_is_not_in_the_source_itself_is_an_error(
    tmp_path: Path, nvcc: None, how: str
) -> None:
    """The compiler sees it and the loader does not: the module would have no functions."""
    launcher = (
        "inline cudaError_t launch_scale(const jitquant::TensorView&, cudaStream_t) {\n"
        "  return cudaSuccess;\n}\n"
    )
    export = 'JITQUANT_EXPORT(launch_scale, "scale(Tensor x) -> ()")\n'
    include = '#include "jitquant/export.h"\n'
    source, sources = tmp_path / "scale.cu", []
    if how == "source":
        source = tmp_path / "scale.cpp"
        source.write_text(include + launcher + export)
        sources = [write_toy(tmp_path)]
    elif how == "header":
        (tmp_path / "scale.cuh").write_text("#pragma once\n" + include + launcher + export)
        source.write_text('#include "scale.cuh"\n')
    else:
        define = '#define EXPORT(name) JITQUANT_EXPORT(name, "scale(Tensor x) -> ()")\n'
        source.write_text(include + launcher + define + "EXPORT(launch_scale)\n")
    with pytest.raises(CompileError, match="that of launch_scale is in a header, ") as caught:
        new_loader(tmp_path / "cache").get("scale", [source, *sources])
    assert caught.value.diagnostics[0].file == str(source)
    assert entries(tmp_path / "cache") == []


def test_what_only_looks_like_the_macro_is_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "k.cu"
    source.write_text(
        "JITQUANT_EXPORT_RESIDENT()\n"
        "#define WRAP JITQUANT_EXPORT(no, 1) \\\n  JITQUANT_EXPORT(no, 2)\n"
        '// JITQUANT_EXPORT(no, 3)\nconst char* s = "JITQUANT_EXPORT(no, 4)";\n'
        "const int big = 1'000'000; const char c = '\"';\n"
        'JITQUANT_EXPORT(yes, "yes(Tensor x) -> ()")\n'
    )
    binding = find_binding("k", str(source))
    assert binding is not None
    assert [e.launcher for e in binding.exports] == ["yes"]
    assert binding.exports[0].line == 7


SLIPS = (
    (
        "cudaError_t f0(const float* x, float s, double* out, const jitquant::TensorView* m)",
        "JITQUANT_EXPORT: expected f0 to take a cudaStream_t last",
    ),
    (
        "void f1(const float* x, float s, float* out, int* n, cudaStream_t)",
        "JITQUANT_EXPORT: expected f1 to return cudaError_t",
    ),
    (
        "cudaError_t f2(const float* x, float s, float* out, cudaStream_t)",
        "JITQUANT_EXPORT: expected f2 to take a parameter for each argument",
    ),
    (
        "cudaError_t f3(const float* x, float s, float* out, float* n, cudaStream_t)",
        "JITQUANT_EXPORT: parameter 3 (from 0) of f3 does not fit",
    ),
    (
        "cudaError_t f4(float* x, float s, float* out, int n, cudaStream_t)",
        "JITQUANT_EXPORT: parameter 0 (from 0) of f4 does not fit",
    ),
    (
        "cudaError_t f5(const float* x, float& s, float* out, int n, cudaStream_t)",
        "JITQUANT_EXPORT: parameter 1 (from 0) of f5 does not fit",
    ),
)


def test_parameters_that_do_not_fit_are_errors_on_the_line_of_the_macro(
    tmp_path: Path, nvcc: None
) -> None:
    source = tmp_path / "bad.cu"
    lines = ['#include "jitquant/export.h"']
    for index, (launcher, _) in enumerate(SLIPS):
        body = "{}" if launcher.startswith("void") else "{ return cudaSuccess; }"
        schema = f'"f{index}(Tensor x, float s, Tensor(a!) out, int n) -> ()"'
        lines += [f"{launcher} {body}", f"JITQUANT_EXPORT(f{index}, {schema})"]
    source.write_text("\n".join(lines))
    with pytest.raises(CompileError) as caught:
        new_loader(tmp_path / "cache").get("bad", [source])
    for index, (_, said) in enumerate(SLIPS):
        line = 3 + 2 * index
        first = next(d for d in caught.value.diagnostics if (d.file, d.line) == (str(source), line))
        assert said in first.message
    assert f"{source}:3: error: static assertion failed" in str(caught.value)


THUNK = """
#include <cstring>
#include "jitquant/export.h"
#define jitquant_export_f thunk  // by that name the loader would refuse it outside of a .cu
using jitquant::TensorView;
cudaError_t f(const TensorView& x, const float* p, int8_t n, const char* how, float* out,
              std::optional<double> value, cudaStream_t) {
  if (n == 1) x.with_rank(3);
  if (n == 2) x.with_size(-1, 7);
  if (n == 3) x.with_shape_of({"y", nullptr, x.dtype, false, 0, 1, x.sizes, x.strides});
  if (n == 4) x.contiguous();
  if (n == 5) x.data<const double>();
  if (n == 6) x.data<float>();
  if (n == 7) x.size(2);
  if (n == 8) x.aligned(64);
  if (n == 9) x.data<const uint8_t>();
  if (how != nullptr && std::strcmp(how, "raise") == 0) return cudaErrorUnknown;
  return p == nullptr && !value ? cudaSuccess : cudaErrorNotReady;
}
JITQUANT_EXPORT(f, "f(Tensor x, Tensor? p, int n, str? how, Tensor(a!) out, float? value) -> ()")

// x: (2, 3) with strides (1, 2); p: None unless `number`; out: a float of its own.
extern "C" const char* call(int type, long long n, const char* how, int number, int* error) {
  static jitquant::Refusal refusal;
  static const int64_t sizes[] = {2, 3}, strides[] = {1, 2}, one[] = {1};
  static float value[16];
  using jitquant::ElementType;
  jitquant::exported::Argument a[6] = {};
  a[0].tensor = {"x", reinterpret_cast<char*>(value) + 4, static_cast<ElementType>(type), false,
                 0, 2, sizes, strides};
  a[1].name = "p", a[1].present = false;
  a[2].name = "n", a[2].integer = n;
  a[3].present = how != nullptr, a[3].text = how;
  a[4].present = true;
  a[4].tensor = {"out", value, ElementType::kFloat32, true, 0, 1, one, one};
  a[5].present = number != 0, a[5].number = number;
  refusal.text[0] = 0;
  *error = jitquant_export_f(a, nullptr, &refusal);
  return refusal.text;
}
"""
FLOAT32, FLOAT8 = 6, 24


def test_what_a_launcher_is_given_and_may_refuse(tmp_path: Path) -> None:
    reason = nvcc_or_reason()
    if reason is not None:
        pytest.skip(reason)
    source = tmp_path / "thunk.cpp"
    source.write_text(THUNK)
    flags = [f"-I{d}" for d in find_nvcc(Memo())[0].include_dirs]
    library = new_loader(tmp_path / "cache").get("thunk", [source], cxx_flags=flags).library
    library.call.restype = ctypes.c_char_p
    error = ctypes.c_int()

    def call(n: int, kind: int = FLOAT32, how: bytes | None = None, value: int = 0) -> str:
        text = library.call(kind, ctypes.c_longlong(n), how, value, ctypes.byref(error))
        return str(text.decode())

    assert (call(0), error.value) == ("", 0)
    assert (call(0, how=b"raise"), error.value) == ("", 999)
    assert (call(0, value=5), error.value) == ("", 600)
    assert call(1) == "x: expected 3 dimensions, got 2"
    assert error.value == 1
    assert call(2) == "x: expected size 7 in dimension -1, got 3"
    assert call(3) == "x: expected the shape of y, (2,), got (2, 3)"
    assert call(4) == "x: expected contiguous memory, got strides (1, 2). Pass x.contiguous()"
    assert call(5) == "x: expected float64, got float32. Convert it with .to()"
    assert call(5, kind=99) == "x: expected float64, got another dtype. Convert it with .to()"
    assert call(6).startswith("x: expected a tensor with (a!) in the schema, as the launcher")
    assert call(7) == "x: expected 3 dimensions or more, as the launcher reads dimension 2, got 2"
    expected = "x: expected memory that starts at a multiple of 64 bytes, got an address "
    assert call(8).startswith(expected)
    assert call(8).endswith(" past one. Pass x.clone()")
    assert call(9) == "x: expected uint8, got float32. Convert it with .to()"
    assert call(9, kind=FLOAT8) == ""
    assert call(200) == "n: expected an integer of 8 bits, as the launcher takes, got 200"


def test_the_names_of_the_dtypes_are_torchs() -> None:
    """Their numbers are compared with torch's where a binding is compiled."""
    headers = Path(__file__).parents[2] / "kernels_cu"
    text = (headers / "include" / "jitquant" / "export.h").read_text()
    numbered = re.findall(r"^  (k\w+) = \d+,$", text, re.M)
    named = dict(re.findall(r"case ElementType::(k\w+):\n      return \"(\w+)\"", text))
    assert list(named) == numbered
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in named.values())
    compared = (headers / "bindings" / "export.h").read_text()
    for constant, name in named.items():
        assert f"JITQUANT_SAME({constant}, " in compared, name
