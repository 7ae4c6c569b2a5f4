"""Which launches of a captured graph are programmatic: those behind a kernel of this project."""

from __future__ import annotations

import ctypes

import pytest
import torch

import jitquant

from .helpers import randn

PROGRAMMATIC = 1  # CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="programmatic launches need compute capability 9.0",
)


class _Edge(ctypes.Structure):
    _fields_ = [
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    ]


def _edges(graph: torch.cuda.CUDAGraph) -> list[bool]:
    """Of a chain of nodes, in order: whether each edge is programmatic."""
    get = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert get(handle, None, None, None, ctypes.byref(count)) == 0
    size = count.value
    starts, ends = (ctypes.c_void_p * size)(), (ctypes.c_void_p * size)()
    data = (_Edge * size)()
    assert get(handle, starts, ends, data, ctypes.byref(count)) == 0
    following = {starts[i]: (ends[i], data[i].type == PROGRAMMATIC) for i in range(size)}
    (node,) = set(starts) - set(ends)
    kinds = []
    while node in following:
        node, programmatic = following[node]
        kinds.append(programmatic)
    assert len(kinds) == size
    return kinds


def test_a_launch_is_programmatic_behind_a_kernel_of_this_project() -> None:
    x, y = randn(64, 7168), randn(64, 7168)
    gsa = torch.full((1,), 0.002, device="cuda")

    def steps() -> list[object]:
        made: list[object] = []
        torch.add(x, 1, out=y)
        made.append(jitquant.quantize_nvfp4(x, gsa))  # behind torch.add
        made.append(jitquant.quantize_fp8(x, granularity="row"))  # of another library
        made.append(jitquant.quantize_per_token_group(x, 128))
        torch.add(x, 1, out=y)
        made.append(jitquant.quantize_mxfp8(x))
        torch.add(x, 1, out=y)
        made.append(jitquant.quantize_nvfp4(x))  # two launches: the first reads ahead
        y.zero_()  # a memset or a kernel of PyTorch
        made.append(jitquant.quantize_mxfp8(x))
        return made

    steps()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        kept = steps()
    assert _edges(graph) == [
        *(False, True, True),
        *(False, False),
        *(False, True, True),
        *(False, False),
    ]
    del kept


def test_a_fork_and_a_join_are_captured() -> None:
    x = randn(64, 7168)
    jitquant.quantize_mxfp8(x)
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    with torch.cuda.graph(graph):
        first = jitquant.quantize_mxfp8(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            second = jitquant.quantize_mxfp8(x)
        third = jitquant.quantize_mxfp8(x)
        torch.cuda.current_stream().wait_stream(side)
        last = jitquant.quantize_mxfp8(x)
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    expected = jitquant.quantize_mxfp8(x)
    for made in (first, second, third, last):
        assert torch.equal(made.data.view(torch.uint8), expected.data.view(torch.uint8))
