"""Sizes and times as people write them."""

from __future__ import annotations

import pytest

from jitquant.loader.units import parse_duration, parse_size, show_duration, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("500M", 500 << 20), ("2 GB", 2 << 30), ("1.5GiB", 3 << 29), ("7kb", 7 << 10)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("text", "seconds"), [("30d", 2592000), ("1.5h", 5400), ("90m", 5400)])
def test_times(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "5X", "1e3", "M"])
def test_what_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a valid size; expected, e\.g\., 500M"):
        parse_size(text)
    with pytest.raises(ValueError, match=r"is not a valid duration; expected, e\.g\., 30d"):
        parse_duration(text)


def test_shown() -> None:
    assert [show_size(n) for n in (12, 2048, 5 << 20)] == ["12 bytes", "2.0 KiB", "5.0 MiB"]
    assert [show_duration(s) for s in (1.25, 90, 7200, 864000)] == [
        "1.2 s",
        "2 min",
        "2 h",
        "10 days",
    ]
