"""Edits in a live process: picked up, refused, and what becomes of the code before them."""

from __future__ import annotations

import os
import pickle
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from jitquant.loader import CompileError, Loader, OldGraphWarning, reloads
from jitquant.loader.watch import live as live_module
from jitquant.loader.watch.inotify import TRUST_SECONDS, Watcher, shared_file_system

from .conftest import Toy
from .toys import new_loader, write_factor, write_plain


def settle(loader: Loader, source: Path) -> None:
    """Until the loader trusts what it has seen of the files."""
    time.sleep(0.15)
    for _ in range(6):
        loader.get(source.stem, [source])


def test_reloading_is_for_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JITQUANT_RELOAD", raising=False)
    assert reloads()  # the tests run from a checkout
    (tmp_path / "kernels_cu").mkdir()
    monkeypatch.setattr(live_module, "_PACKAGE", str(tmp_path))  # as a wheel is laid out
    assert not reloads()
    monkeypatch.setenv("JITQUANT_RELOAD", "1")
    assert reloads()
    monkeypatch.setenv("JITQUANT_RELOAD", "0")
    assert not reloads()
    monkeypatch.setenv("JITQUANT_RELOAD", "yes")
    with pytest.raises(ValueError, match="JITQUANT_RELOAD='yes': give 1"):
        reloads()


@pytest.fixture
def as_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a package that is laid out as an installed wheel is."""
    package = tmp_path / "site" / "jitquant"
    (package / "kernels_cu").mkdir(parents=True)
    monkeypatch.setattr(live_module, "_PACKAGE", str(package))
    return package


def test_a_wheel_reloads_files_that_are_not_its_own(as_a_wheel: Path, tmp_path: Path) -> None:
    own = str(as_a_wheel / "kernels_cu" / "amax.cu")
    assert not reloads([own, str(as_a_wheel / "kernels_cu" / "include")])
    assert reloads([own, str(tmp_path / "site" / "jitquant_mine" / "mine.cu")])
    assert reloads([str(tmp_path / "mine.cu")])


def test_beside_a_wheel_an_edit_of_ones_own_is_picked_up(
    plain: Toy, tmp_path: Path, as_a_wheel: Path
) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache, kernels_dir=as_a_wheel / "kernels_cu")
    module = loader.get("plain", [source])
    fresh = loader.up_to_date_check(module)
    write_factor(source.with_suffix(".h"), 4)
    assert not fresh()
    assert loader.get("plain", [source]).library.factor() == 4
    # The wheel's own are not looked at.
    inside = write_plain(as_a_wheel / "kernels_cu")
    module = loader.get("plain", ["plain.cpp"])
    write_factor(inside.with_suffix(".h"), 5)
    assert loader.get("plain", ["plain.cpp"]) is module


def test_without_reloading_an_edit_waits_for_the_next_process(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    monkeypatch.setenv("JITQUANT_RELOAD", "0")
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    fresh = loader.up_to_date_check(module)
    write_factor(source.with_suffix(".h"), 4)
    assert loader.get("plain", [source]) is module
    assert fresh()
    # Another directory is another module all the same.
    monkeypatch.chdir(source.parent)
    assert loader.get("plain", ["./plain.cpp"]).library.factor() == 4
    assert new_loader(cache).get("plain", [source]).library.factor() == 4


def test_a_process_turns_reloading_off_and_on_by_freezing(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    monkeypatch.setenv("JITQUANT_RELOAD", "0")  # too late for this module
    loader.freeze(build=True)
    write_factor(source.with_suffix(".h"), 4)
    assert loader.get("plain", [source]) is module
    loader.unfreeze()
    assert loader.get("plain", [source]).library.factor() == 4
    # Now it was loaded with the variable.
    write_factor(source.with_suffix(".h"), 5)
    assert loader.get("plain", [source]).library.factor() == 4


def test_an_edit_that_fails_offers_the_last_good_module(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    good = source.read_text()
    source.write_text("no C++\n")
    for _ in range(2):
        with pytest.raises(
            CompileError, match=r"`last_good`, and after jitquant\.freeze"
        ) as caught:
            loader.get("plain", [source])
        assert caught.value.last_good is module
    assert module.library.factor() == 3
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.last_good is None
    assert copy.diagnostics == caught.value.diagnostics
    loader.freeze()
    assert loader.get("plain", [source]) is module
    loader.unfreeze()
    source.unlink()
    with pytest.raises(FileNotFoundError):
        loader.get("plain", [source])
    source.write_text(good)
    assert loader.get("plain", [source]) is module
    # A first build has nothing to offer.
    bad = tmp_path / "bad.cpp"
    bad.write_text("no C++\n")
    with pytest.raises(CompileError) as caught:
        loader.get("bad", [bad])
    assert caught.value.last_good is None
    assert "last_good" not in str(caught.value)


def test_an_operator_keeps_its_name_while_its_code_moves(toy: Toy, tmp_path: Path) -> None:
    source, cache = toy.copy(tmp_path)
    loader = new_loader(cache)
    library = torch.library.Library("jitquant_test_live", "DEF")
    library.define("scale(Tensor x, float s) -> Tensor")
    library.impl("scale", lambda x, s: loader.get("toy", [source]).scale(x, s), "CPU")
    op = torch.ops.jitquant_test_live.scale.default
    x = torch.ones(2)
    assert op(x, 2.0).tolist() == [6, 6]
    settle(loader, source)
    write_factor(source.with_suffix(".cuh"), 5)
    assert op(x, 2.0).tolist() == [10, 10]
    assert torch.ops.jitquant_test_live.scale.default is op


CAPTURED = """
#include "plain.h"
__attribute__((visibility("default"))) int jitquant_captured = 0;
extern "C" int factor() { return FACTOR; }
extern "C" void capture() { jitquant_captured = 1; }
"""


def test_a_graph_of_the_code_before_an_edit_is_named_once(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    source.write_text(CAPTURED)
    loader = new_loader(cache)
    first = loader.get("plain", [source])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_factor(source.with_suffix(".h"), 4)
        second = loader.get("plain", [source])  # nothing was captured
    second.library.capture()
    write_factor(source.with_suffix(".h"), 5)
    with pytest.warns(OldGraphWarning, match="module 'plain' was edited .* capture them again"):
        loader.get("plain", [source])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (6, 7):
            write_factor(source.with_suffix(".h"), value)
            assert loader.get("plain", [source]).library.factor() == value
    # Another module of the same name is another module.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.get("plain", [source], cxx_flags=["-DOTHER"])
    # A graph that was captured with an old module later on is named as well.
    first.library.capture()
    write_factor(source.with_suffix(".h"), 8)
    with pytest.warns(OldGraphWarning, match=first.key[:12]):
        loader.get("plain", [source])


@pytest.fixture
def fresh(plain: Toy, tmp_path: Path) -> tuple[Callable[[], bool], Path, Loader]:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    settle(loader, source)
    return loader.up_to_date_check(module), source, loader


def overwrite(header: Path) -> None:
    write_factor(header, 9)


def rename_over(header: Path) -> None:
    other = header.with_suffix(".new")
    write_factor(other, 9)
    other.rename(header)


def remove(header: Path) -> None:
    header.unlink()


def shadow(header: Path) -> None:
    header.parent.rename(header.parent.with_name("old"))
    header.parent.mkdir()


def append_through_an_open_file(header: Path) -> None:
    with header.open("a") as stream:
        stream.write("\n")
        stream.flush()


@pytest.mark.parametrize(
    "edit", [overwrite, rename_over, remove, shadow, append_through_an_open_file]
)
def test_no_edit_is_missed(
    fresh: tuple[Callable[[], bool], Path, Loader], edit: Callable[[Path], None]
) -> None:
    is_fresh, source, _ = fresh
    for _ in range(20):
        assert is_fresh()
    edit(source.with_suffix(".h"))
    assert not is_fresh()
    assert not is_fresh()


def test_an_edit_through_another_name_of_a_file_is_seen(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    other = tmp_path / "elsewhere" / "other.h"
    other.hardlink_to(source.with_suffix(".h"))
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    settle(loader, source)
    is_fresh = loader.up_to_date_check(module)
    assert all(is_fresh() for _ in range(20))
    write_factor(other, 9)
    assert not is_fresh()


def test_every_one_of_many_edits_is_seen(plain: Toy, tmp_path: Path) -> None:
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    for value in (3, 4) * 4:
        write_factor(source.with_suffix(".h"), value)
        module = loader.get("plain", [source])
        assert module.library.factor() == value
        settle(loader, source)
        is_fresh = loader.up_to_date_check(module)
        assert all(is_fresh() for _ in range(100))
        write_factor(source.with_suffix(".h"), 9)
        assert not any(is_fresh() for _ in range(100))


def test_freshness_needs_a_module_that_is_current(
    fresh: tuple[Callable[[], bool], Path, Loader],
) -> None:
    is_fresh, source, loader = fresh
    module = loader.get("plain", [source])
    write_factor(source.with_suffix(".h"), 4)
    new = loader.get("plain", [source])
    assert not is_fresh()
    assert loader.up_to_date_check(new)()
    with pytest.raises(ValueError, match="ask for it again"):
        loader.up_to_date_check(module)
    loader.freeze()
    assert is_fresh()


def test_freshness_looks_at_the_files_every_half_second_only(
    fresh: tuple[Callable[[], bool], Path, Loader], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fresh, source, _ = fresh
    looks = 0

    def stat(path: object, *args: object, real: object = os.stat, **options: object) -> object:
        nonlocal looks
        looks += str(path) == str(source)
        return real(path, *args, **options)  # type: ignore[operator]

    monkeypatch.setattr(os, "stat", stat)
    started = time.monotonic()
    assert all(is_fresh() for _ in range(10000))
    assert looks <= (time.monotonic() - started) / TRUST_SECONDS + 1


def test_a_program_may_close_all_descriptors(
    fresh: tuple[Callable[[], bool], Path, Loader], tmp_path: Path
) -> None:
    """Others get their numbers, and are left alone."""
    is_fresh, source, loader = fresh
    watcher = loader._watcher
    assert watcher is not None
    assert watcher._poll is not None
    numbers = (watcher._descriptor, watcher._poll.fileno())
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        for number in numbers:
            os.dup2(other, number)
        assert is_fresh()
        assert loader.get("plain", [source]).library.factor() == 3
        write_factor(source.with_suffix(".h"), 4)
        assert not is_fresh()
        assert loader.get("plain", [source]).library.factor() == 4
        watcher.close()
        assert all(os.path.samestat(os.fstat(n), os.fstat(other)) for n in numbers)
    finally:
        for number in (other, *numbers):
            os.close(number)


def test_where_a_file_system_is_silent_files_are_looked_at(
    plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jitquant.loader.watch import inotify as watch

    assert not shared_file_system("/")
    assert shared_file_system(str(tmp_path / "nowhere"))
    monkeypatch.setattr(watch, "shared_file_system", lambda directory: "nfs")
    source, cache = plain.copy(tmp_path)
    loader = new_loader(cache)
    module = loader.get("plain", [source])
    settle(loader, source)
    fresh = loader.up_to_date_check(module)
    assert fresh()
    watcher = loader._watcher
    assert watcher is not None
    monkeypatch.setattr(Watcher, "look", lambda self: 0)  # not one event comes
    write_factor(source.with_suffix(".h"), 4)
    assert not fresh()
    assert loader.get("plain", [source]).library.factor() == 4
