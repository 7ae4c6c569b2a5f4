"""What describes a model's folder: config.json, and the index of its weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        FileNotFoundError, ValueError: the file is missing, or it is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}. Download it again") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(found).__name__}")
    return found


def object_in(path: Path, whole: dict[str, Any], key: str) -> dict[str, Any]:
    """A JSON object within that of a file; empty if it is missing or null.

    Raises:
        ValueError: it is something else.
    """
    found = whole.get(key)
    if found is not None and not isinstance(found, dict):
        raise ValueError(
            f"{key} in {path}: expected a JSON object, got {found!r}. Download it again"
        )
    return found or {}


def read_config(directory: Path, argument: str) -> dict[str, Any]:
    """The config.json of a folder, which messages call by the name of an argument.

    Raises:
        FileNotFoundError, ValueError: as `read_json`, or the folder is missing.
    """
    if not directory.is_dir():
        raise FileNotFoundError(
            f"{argument}: expected a model's folder, got {directory}, which is not a directory"
        )
    path = directory / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{argument}: expected a model's folder, got {directory}, which has no config.json"
        )
    return read_json(path)


def read_index(directory: Path, argument: str) -> dict[str, str] | None:
    """The file of each tensor, by name; None without an index, or beside a whole model that it does
    not name, which transformers reads instead.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the index is broken, or names files elsewhere.
    """
    index = directory / INDEX
    if not index.is_file():
        return None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index}: expected a weight_map, got none. Download it again")
    if not weight_map:
        raise ValueError(
            f"weight_map in {index}: expected a file for each tensor, got none. Download it again"
        )
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(
                f"weight_map in {index}: expected names of files beside it, got {name!r}. Download "
                "it again"
            )
    if WHOLE not in weight_map.values() and (directory / WHOLE).is_file():
        return None
    absent = sorted({name for name in weight_map.values() if not (directory / name).is_file()})
    if absent:
        raise FileNotFoundError(
            f"{argument}: expected the files that {INDEX} names, got {directory}, which has no "
            f"{', '.join(absent)}. Download it again"
        )
    return weight_map
