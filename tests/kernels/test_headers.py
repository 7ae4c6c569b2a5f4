"""The headers of ``kernels_cu/bindings/declared`` are those that the declarations give."""

from __future__ import annotations

from harness.headers import BINDINGS, headers


def test_headers_are_what_the_declarations_give() -> None:
    folder = BINDINGS / "declared"
    stored = {path: path.read_text() for path in folder.iterdir()}
    given = headers()
    wrong = sorted(p.name for p in given.keys() | stored.keys() if given.get(p) != stored.get(p))
    assert not wrong, f"{', '.join(wrong)}: run ./scripts/headers"
