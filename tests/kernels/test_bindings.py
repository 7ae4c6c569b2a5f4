"""A binding gives the parameters of a launcher the arguments and results of an op."""

from __future__ import annotations

import pytest
from harness.bindings import Binding, Parameter, parse

ARGUMENTS = [
    Parameter("View", "x"),
    Parameter("std::optional<View>", "signs"),
    Parameter("double", "divisor"),
    Parameter("std::string_view", "granularity"),
    Parameter("std::string_view", "scale_layout"),
]


def _binding(launcher: str, *, results: tuple[str, ...] = ("gsa",)) -> str:
    return Binding("row_gsa", "RowGsa", ARGUMENTS, results, False, parse(launcher)).text()


def test_a_binding_gives_a_launcher_what_its_parameters_say() -> None:
    text = _binding(
        "int64_t row_gsa_partials(const Matrix& x, bool by_row);\n"
        "cudaError_t launch_row_gsa(const Matrix& x, const int8_t* signs, float divisor, "
        "bool by_row, float* partials, float* gsa, cudaStream_t stream);\n"
    )
    assert text == (
        "void row_gsa(Call& call, const declared::RowGsa& args, Result& gsa_result) {\n"
        '  const Matrix x = matrix_of(args.x, "x");\n'
        "  const bool by_row = by_row_of(args.granularity);\n"
        "  const auto planned = args.plan();\n"
        '  const Memory gsa = gsa_result.memory("gsa", planned[0], args.x);\n'
        "  const Launching at(call, args.x);\n"
        "  const Workspace partials(row_gsa_partials(x, by_row), args.x);\n"
        "  check_launch(launch_row_gsa(x, data_of<int8_t>(args.signs), "
        "static_cast<float>(args.divisor),\n"
        "      by_row, partials.floats(), static_cast<float*>(gsa.data), at.stream), "
        '"row_gsa");\n'
        "}\n"
    )


def test_a_struct_is_made_of_results() -> None:
    text = _binding(
        "cudaError_t launch_row(const Nvfp4Output& out, const Nvfp4Output& out_t, "
        "cudaStream_t stream);\n",
        results=("x_fp4", "x_sf", "x_fp4_t", "x_sf_t"),
    )
    assert "const Nvfp4Output out = packed(x_fp4, x_sf, args.scale_layout);\n" in text
    assert "const Nvfp4Output out_t = packed(x_fp4_t, x_sf_t, args.scale_layout);\n" in text
    assert text.index("x_sf_t_result.memory(") < text.index("const Nvfp4Output out ")


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("int row_gsa(int n);\n", "expected a function launch_row_gsa"),
        (
            "cudaError_t launch_row_gsa(const Matrix& y, cudaStream_t stream);\n",
            r"launch_row_gsa: expected y \(Matrix\) to be an argument or a result of row_gsa",
        ),
        (
            "cudaError_t launch_row_gsa(float* partials, cudaStream_t stream);\n",
            r"or to be a float\* whose size row_gsa_partials\(\) returns",
        ),
    ],
)
def test_what_nothing_gives_is_an_error(launcher: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _binding(launcher)
