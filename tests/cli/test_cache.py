"""``jitquant cache``."""

from __future__ import annotations

import os
import time
from pathlib import Path

from loader.toys import entries

from .conftest import Built, Run


def test_list(run: Run, cached: Built) -> None:
    (build,) = run("cache", "list", "--json").json["builds"]
    assert (build["name"], build["archs"], build["in_use"]) == ("toy", ["90a", "100a"], False)
    shown = run("cache", "list").out
    assert "sm_90a, sm_100a" in shown
    assert f"in {cached.cache}" in shown


def test_prune_needs_a_limit_and_understands_units(run: Run, cached: Built) -> None:
    refused = run("cache", "prune")
    assert refused.code == 2
    assert "--older-than" in refused.err
    assert run("cache", "prune", "--max-size", "many").code == 1
    assert run("cache", "prune", "--max-size", "1GB", "--json").json["removed"] == []
    (entry,) = entries(cached.cache)
    old = time.time() - 3 * 86400
    os.utime(entry, (old, old))
    assert run("cache", "prune", "--older-than", "1w", "--json").json["removed"] == []
    done = run("cache", "prune", "--older-than", "2d")
    assert "removed toy" in done.out
    assert entries(cached.cache) == []


def test_clear(run: Run, cached: Built) -> None:
    assert len(run("cache", "clear", "--json").json["removed"]) == 1
    assert run("cache", "list").out.startswith("0 builds, 0 bytes")


def test_a_cache_that_others_can_write_to_is_refused(run: Run, cached: Built) -> None:
    cached.cache.chmod(0o777)
    for command in (["list"], ["clear"], ["prune", "--max-size", "0"]):
        done = run("cache", *command)
        assert done.code == 1
        assert "has mode 0777" in done.err
    cached.cache.chmod(0o700)


def test_what_is_not_there_is_empty(run: Run, tmp_path: Path) -> None:
    assert run("cache", "list", "--json").json["builds"] == []
    assert run("cache", "clear").code == 0
    assert not (tmp_path / "cache").exists()
