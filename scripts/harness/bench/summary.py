"""results/summary.json: of each measurement what the documents show of it, and nothing else.

A section has the name of the raw file that it is made from. Numbers have six digits, and each row
has its own line, so that a new measurement is readable as a diff.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

NAME = "summary.json"

Record = dict[str, Any]


def read(results: Path) -> dict[str, Record]:
    """The sections by name.

    Raises:
        OSError: ``results`` has no summary.
    """
    sections: dict[str, Record] = json.loads((results / NAME).read_text(encoding="utf-8"))
    return sections


def write(results: Path, sections: dict[str, Record]) -> Path:
    """Write the sections in the order of their names; returns the path."""
    path = results / NAME
    path.write_text(_text(dict(sorted(sections.items()))) + "\n", encoding="utf-8")
    return path


def save_part(folder: Path, stem: str, record: Record) -> None:
    """Write what a run has so far to ``<stem>.partial.json``, until `save` has the whole."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(_part_of(folder, stem), record)


def _part_of(folder: Path, stem: str) -> Path:
    return folder / f"{stem}.partial.json"


def _write_json(path: Path, record: Record) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def save(folder: Path, stem: str, record: Record) -> Path:
    """Write a raw record: into its section if the folder has a summary, else to its own file.

    Parts of it that were saved before are removed.

    Returns:
        The path of what was written.

    Raises:
        LookupError: the record lacks something that its section has.
        ValueError: the folder has a summary, which has no such section.
    """
    if not (folder / NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{stem}.json"
        _write_json(path, record)
    else:
        section = section_of(stem, record)
        if section is None:
            raise ValueError(f"{stem}: expected one of {', '.join(sorted(SECTIONS))}")
        path = write(folder, {**read(folder), stem: section})
    _part_of(folder, stem).unlink(missing_ok=True)
    return path


def add_folder(results: Path, raw: Path) -> tuple[list[str], list[str]]:
    """Replace the sections of all raw files in a folder.

    Returns:
        The names of these sections, and of the files that no section is made from.

    Raises:
        LookupError: a record lacks something that its section has.
        OSError: ``raw`` is not a directory.
    """
    sections, names, others = read(results), [], []
    for path in sorted(path for path in raw.iterdir() if path.suffix == ".json"):
        section = section_of(path.stem, json.loads(path.read_text(encoding="utf-8")))
        if section is None:
            others.append(path.name)
        else:
            sections[path.stem] = section
            names.append(path.stem)
    write(results, sections)
    return names, others


def section_of(stem: str, record: Record) -> Record | None:
    """The section of a raw record; None if no section has that name.

    Raises:
        LookupError: the record lacks something that the section has.
    """
    make = SECTIONS.get(stem) or (SECTIONS["model"] if stem.startswith("model-") else None)
    if make is None:
        return None
    try:
        return _rounded({**_origin(record), **make(record)})
    except (KeyError, TypeError) as error:
        raise LookupError(f"{stem}.json lacks {error}") from error


LIBRARIES = ("marlin", "humming")
"""Other libraries with products of weights in four bits, as keys of a row."""


def products(sections: dict[str, Record]) -> list[Record]:
    """The products that other libraries were timed on, in one run of one GPU: ``linear-peers``.

    Raises:
        KeyError: there are no such times.
    """
    rows: list[Record] = sections["linear-peers"]["rows"]
    return [row for row in rows if any(name in row for name in LIBRARIES)]


def _origin(record: Record) -> Record:
    """On what it was measured, when, and with which sources."""
    gpu = record.get("gpu", record.get("device"))
    origin = {
        "gpu": gpu["name"] if isinstance(gpu, dict) else gpu,
        "torch": record.get("torch"),
        "utc": record.get("utc"),
        "kernels_cu_sha256": record.get("kernels_cu_sha256"),
    }
    found = {key: value for key, value in origin.items() if value is not None}
    if "ceilings_gb_per_s" in record:
        found["ceilings_gb_per_s"] = record["ceilings_gb_per_s"]
    return found


def _kernels(record: Record) -> Record:
    """A row for each op, with a list over M of each quantity."""
    return _by_size(record, ("us", "sustained_us", "of_floor", "plain_us"))


def _peers(record: Record) -> Record:
    """Each op beside the fastest of its peers, with its name, and the versions of all."""

    def best(peers: Record, *keys: str) -> Record:
        timed = ((us, name) for name, us in peers.items() if us is not None)
        return dict(zip(keys, min(timed, default=(None, None)), strict=True))

    rows = [
        {
            **row,
            **best(row["peers"], "peer_us", "peer"),
            **best(row["peers_behind"], "peer_behind_us", "peer_behind"),
        }
        for row in record["rows"]
    ]
    keys = ("us", "of_floor", "plain_us", "peer_us", "peer")
    behind = ("behind_us", "peer_behind_us", "peer_behind")
    return {"libraries": record["peers"], **_by_size({**record, "rows": rows}, (*keys, *behind))}


def _by_size(record: Record, keys: Iterable[str]) -> Record:
    rows = record["rows"]
    sizes = sorted({row["m"] for row in rows})
    made = []
    for op in dict.fromkeys(row["op"] for row in rows):
        by_size = {row["m"]: row for row in rows if row["op"] == op}
        columns = {key: [by_size[m][key] for m in sizes] for key in keys}
        made.append({"op": op, **{k: v for k, v in columns.items() if set(v) != {None}}})
    return {"n": record["n"], "dtype": record["dtype"], "m": sizes, "rows": made}


def _sweep(record: Record) -> Record:
    """A row for each shape, with the part of the floor that each op reached."""
    points = record["points"]
    return {
        "rows": [
            {
                "case": case,
                **{p["op"]: p["of_floor"] for p in points if p["case"] == case and p["us"]},
            }
            for case in dict.fromkeys(point["case"] for point in points)
        ]
    }


def _rows(*keys: str, more: Iterable[str] = ()) -> Callable[[Record], Record]:
    """These keys of each row that has them, and ``more`` of the record."""

    def make(record: Record) -> Record:
        found = {key: record[key] for key in more if key in record}
        return {
            **found,
            "rows": [
                {key: row[key] for key in keys if row.get(key) is not None}
                for row in record["rows"]
            ],
        }

    return make


def _only(*keys: str) -> Callable[[Record], Record]:
    """These keys of a record that has them."""
    return lambda record: {key: record[key] for key in keys if key in record}


_LINEAR = ("n", "k", "rows", "floor", "bf16", "weight_only", "weight_only_behind", "quantized")

SECTIONS: dict[str, Callable[[Record], Record]] = {
    "kernels": _kernels,
    "kernels-second": _kernels,
    "kernels-fp8": _kernels,
    "kernels-ragged": _kernels,
    "kernels-peers": _peers,
    "kernels-fp8-peers": _peers,
    "kernels-fp8-peers-h200": _peers,
    "rmsnorm-compiled": _kernels,
    "shapes": _rows("op", "m", "n", "us", "floor_us", "compiled_us"),
    "sweep": _sweep,
    "host": _rows("name", "us", "ratio", "out_us", "out_ratio", "compiled_us", more=("m", "n")),
    "linear": _rows(*_LINEAR, "fp8", "fp8_weight", "marlin", "humming", more=("peers",)),
    "linear-peers": _rows(*_LINEAR, "marlin", "humming", more=("peers",)),
    "layers": _rows("name", "bf16", "fp8", "ratio", "nvfp4"),
    "model": _rows("format", "sequences", "tokens", "us", "floor_us", "launches"),
    "experts": _rows(
        *("experts", "hidden", "intermediate", "tokens", "routing", "floor", "layer", "behind"),
        "bf16",
    ),
    "granularity": _rows("table", "call", "shape", "floor_us", "us", "unfused_us"),
    "fp8_training": _only("arguments", "parameters", "held_out", "seconds"),
    "gpu_tests": _only("seconds", "outcomes", "not_passed"),
    "sanitizer": _only("memcheck", "racecheck", "initcheck", "synccheck"),
    "loader": _only("cpus", "load", "seconds"),
}


def _rounded(value: Any) -> Any:
    """Numbers that are not whole, to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value


def _text(sections: dict[str, Record]) -> str:
    """JSON in which each entry of a section, and each row, has a line."""

    def entry(key: str, value: Any) -> str:
        if key != "rows":
            return f"  {json.dumps(key)}: {json.dumps(value)}"
        rows = ",\n".join(f"   {json.dumps(row)}" for row in value)
        return f'  "rows": [\n{rows}\n  ]'

    parts = []
    for name, section in sections.items():
        entries = ",\n".join(entry(key, value) for key, value in section.items())
        parts.append(f" {json.dumps(name)}: {{\n{entries}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}"
