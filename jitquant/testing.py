"""Checks for model code and for the project itself: values, captures, launches.

All except `checked` and `bytes_of` need a CUDA device and raise `RuntimeError` without one. Kernels
are built and loaded before a check, so even the first call of a step can be checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from jitquant.formats import as_bytes
from jitquant.ops import _checks_values

__all__ = ["assert_capturable", "assert_no_sync", "bytes_of", "checked", "count_launches"]

_KERNEL, _MEMCPY, _MEMSET, _CHILD_GRAPH = 0, 1, 2, 4  # CUgraphNodeType
_SLEEP_CYCLES = 200_000_000  # about 0.1 s at 2 GHz


def bytes_of(t: Tensor) -> Tensor:
    """The bytes of a tensor, uint8 and flat, for comparisons that NaN and packed types allow."""
    return t.detach().contiguous().view(torch.uint8).reshape(-1)


class _Checked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Checks the values of each jitquant op before it runs, and waits for it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "jitquant":
            return func(*args, **kwargs)
        name = func._schema.name.removeprefix("jitquant::")
        arguments = {a.name: a.default_value for a in func._schema.arguments if not a.is_out}
        given = dict(zip(arguments, args, strict=False)) | kwargs
        arguments |= {name: value for name, value in given.items() if name in arguments}
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        if any(t.is_meta or type(t) not in (Tensor, torch.nn.Parameter) for t in tensors):
            return func(*args, **kwargs)  # fake ones have no values
        on_gpu = any(t.is_cuda for t in tensors)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{name} is called in jitquant.testing.checked() while a CUDA graph is captured, "
                "which does not allow to read values; capture outside of it"
            )
        _checks_values.values(name, arguments)
        result = func(*args, **kwargs)
        if on_gpu:
            try:
                torch.cuda.synchronize(tensors[0].device)
            except RuntimeError as error:
                raise RuntimeError(f"{name} or what ran before it failed: {error}") from error
        return result


@contextmanager
def checked() -> Iterator[None]:
    """A context in which each call of jitquant checks values on the device, and waits for the GPU.

    Normally a call does not read its tensors, because that would synchronize: invalid values give
    wrong results, but nothing outside of the tensors is touched. Checks ``offsets`` and ``sizes``
    (ascending, from the beginning of the buffer to its end, at the multiples that the op needs; a
    leading 0 is 0),
    ``counts`` (0 to the rows of a batch), ``gsa`` and ``scale`` tensors to quantize with (positive
    and finite), and ``scale_inv``, ``gsa``, ``x_sf``, ``amax`` and ``inv_rms`` to read (not
    negative). For debugging, not for production. Also works on CPU tensors.

    Raises:
        ValueError: at the call that has such values; it names the op and the argument.
        RuntimeError: a CUDA error, at the call that caused it, or a call while a graph is captured.
    """
    _checks_values.THREAD.depth += 1
    try:
        with _Checked():  # type: ignore[no-untyped-call]
            yield
    finally:
        _checks_values.THREAD.depth -= 1


def assert_capturable(
    fn: Callable[..., Any], *args: Any, replays: int = 2, warmup_calls: int = 0
) -> None:
    """Captures ``fn(*args)`` in a CUDA graph, replays it on fresh inputs and compares.

    Args:
        fn: returns tensors, in any nesting that is a pytree. May write to its arguments: these are
            compared too.
        args: pytrees; every floating CUDA tensor of at least 16 bits is replaced by fresh values
            before each replay (a random permutation of its own, times a random factor near 1), all
            other arguments stay. The caller's tensors are not changed.
        replays: how many fresh inputs.
        warmup_calls: eager calls before the capture, for code that initializes in its first call.
            With 0 the captured call is the first.

    Raises:
        AssertionError: a replay gives different bytes than the eager call; names the result.
        RuntimeError: no CUDA device, or an error during capture.
    """
    _need_device()
    leaves, spec = pytree.tree_flatten(args)
    static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    call_args = pytree.tree_unflatten(static, spec)
    for _ in range(warmup_calls):
        fn(*call_args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fn(*call_args)
    for replay in range(replays):
        fresh = [_fresh(leaf) for leaf in leaves]
        for target, source in zip(static, fresh, strict=True):
            if isinstance(target, Tensor):
                as_bytes(target).copy_(as_bytes(source))
        graph.replay()
        torch.cuda.synchronize()
        expected = fn(*pytree.tree_unflatten(fresh, spec))
        _compare("result", captured, expected, replay)
        _compare("argument", static, fresh, replay)


def assert_no_sync(fn: Callable[..., Any], *args: Any) -> None:
    """Fails if ``fn(*args)`` synchronizes the CPU with the GPU.

    Calls it twice to initialize, then under ``torch.cuda.set_sync_debug_mode("error")`` after a
    kernel that keeps the stream busy: a call that waits for this kernel has synchronized, in
    whichever library.

    Raises:
        AssertionError: the call returned only after the GPU had finished earlier work.
        RuntimeError: PyTorch saw a synchronizing call (its own message), or no CUDA device.
    """
    _need_device()
    for _ in range(2):
        fn(*args)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    busy = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    busy.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn(*args)
        waited = busy.query()  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.set_sync_debug_mode(before)
        torch.cuda.synchronize()
    if waited:
        raise AssertionError(f"{_name(fn)} returned only when the GPU had finished earlier work")


def count_launches(fn: Callable[..., Any], *args: Any) -> int:
    """Kernel launches, copies and memsets of one call of ``fn(*args)``.

    Counts in a capture, so nothing is executed and the count is exact. Calls ``fn`` once before, to
    initialize.

    Raises:
        RuntimeError: no CUDA device, or ``fn`` cannot be captured.
    """
    _need_device()
    fn(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        kept = fn(*args)
    driver = ctypes.CDLL("libcuda.so.1")
    count = _count_nodes(driver, ctypes.c_void_p(graph.raw_cuda_graph()))
    del kept
    return count


def _count_nodes(driver: ctypes.CDLL, graph: ctypes.c_void_p) -> int:
    size = ctypes.c_size_t()
    _check(driver.cuGraphGetNodes(graph, None, ctypes.byref(size)))
    nodes = (ctypes.c_void_p * size.value)()
    _check(driver.cuGraphGetNodes(graph, nodes, ctypes.byref(size)))
    total = 0
    for node in nodes[: size.value]:
        kind = ctypes.c_int()
        _check(driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)))
        if kind.value in (_KERNEL, _MEMCPY, _MEMSET):
            total += 1
        elif kind.value == _CHILD_GRAPH:
            child = ctypes.c_void_p()
            _check(driver.cuGraphChildGraphNodeGetGraph(ctypes.c_void_p(node), ctypes.byref(child)))
            total += _count_nodes(driver, child)
    return total


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"the CUDA driver could not read the captured graph: error {status}")


def _need_device() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "jitquant.testing looks at launches and captures: it needs a CUDA device"
        )


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", repr(fn))


def _fresh(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not (leaf.is_cuda and leaf.is_floating_point() and leaf.element_size() >= 2):
        return leaf.clone()
    order = torch.randperm(leaf.numel(), device=leaf.device)
    factor = 0.5 + torch.rand((), device=leaf.device)
    values = (leaf.reshape(-1)[order].float() * factor).to(leaf.dtype).reshape(leaf.shape)
    return leaf.clone().copy_(values)  # a clone keeps the strides of a dense tensor


def _compare(what: str, got: Any, expected: Any, replay: int) -> None:
    got_leaves, expected_leaves = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    for i, (a, b) in enumerate(zip(got_leaves, expected_leaves, strict=True)):
        if not isinstance(a, Tensor):
            continue
        if a.shape != b.shape or not torch.equal(bytes_of(a), bytes_of(b)):
            raise AssertionError(f"{what} {i} of replay {replay} differs from the eager call's")
