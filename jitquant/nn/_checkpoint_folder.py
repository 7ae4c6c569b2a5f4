"""The folder that `quantize_checkpoint` writes: unfinished work, and all but the weights."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jitquant.formats import NVFP4_BLOCK
from jitquant.loader.units import show_size
from jitquant.nn._checkpoint_source import DESCRIPTIONS, Source
from jitquant.nn._checkpoint_work import Work
from jitquant.nn._compressed_tensors import FileScheme, quantization_config
from jitquant.nn._model_folder import INDEX, WHOLE, read_json

SUMS = "SHA256SUMS"
_STATE = "progress.json"
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".tmp")
_SPARE = 64 << 20  # bytes that are left free
_NOT_IN_MXFP4 = (
    "model.layers.*.self_attn",
    "model.layers.*.mlp.router",
    "model.embed_tokens",
    "lm_head",
)
"""As in openai/gpt-oss-20b, word for word: some readers compare the list."""


@contextlib.contextmanager
def alone(partial: Path) -> Iterator[None]:
    """Creates the working folder, and keeps other calls out of it.

    Raises:
        FileExistsError: another call works in it.
    """
    partial.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileExistsError(
                f"{partial}: expected no other call that works in it, got one. Wait until it ends"
            ) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def begin(
    partial: Path, what: dict[str, Any], restart: bool
) -> tuple[dict[str, str], list[str] | None]:
    """Finds what an interrupted call has finished in the working folder.

    Returns:
        The hashes of the finished files, and the names that stay in FP8, or None.
    """
    state = partial / _STATE
    if restart:
        if not state.is_file() and any(partial.iterdir()):
            raise FileExistsError(
                f"{partial}: expected the work of an unfinished call, got other files. Remove them"
            )
        for left in partial.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    for left in partial.glob("*.tmp"):
        left.unlink()
    if not any(partial.iterdir()):  # new, or of a call that was killed before it had a state
        keep(partial, what, {}, None)
        return {}, None
    kept = _read(state)
    if kept is None or kept["what"] != json.loads(json.dumps(what)):
        raise FileExistsError(
            f"{partial}: expected the work of an unfinished call with the same arguments, got that "
            "of one with other arguments or another source. Start over with restart=True "
            "(--restart)"
        )
    done: dict[str, str] = kept["done"]
    whole = {file: digest for file, digest in done.items() if (partial / file).is_file()}
    return whole, kept["in_fp8"]


def check_free(out: Path) -> None:
    """Checks that a folder can be written to, or may be that of a call with the same arguments.

    Raises:
        FileExistsError: it is there already, or a disk is mounted there.
    """
    if os.path.ismount(out):
        raise FileExistsError(
            f"out: expected a folder that does not exist yet, got {out}, where a disk is mounted. "
            f"Give a folder in it, such as {out / 'model'}"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not (out / _STATE).is_file():
        raise _is_there(out)


def _is_there(out: Path) -> FileExistsError:
    return FileExistsError(
        f"out: expected a folder that does not exist yet, got {out}, which is there already. Give "
        "another one, or remove it"
    )


def end(partial: Path, out: Path) -> None:
    """Gives the complete folder its name.

    What tells that it was unfinished goes last: a call that was killed in between is told from
    another one by it.
    """
    if out.is_dir():
        out.rmdir()
    partial.rename(out)
    (out / _STATE).unlink()


def ended(out: Path, what: dict[str, Any]) -> tuple[dict[str, str], list[str] | None] | None:
    """What `begin` returns, of a folder that an interrupted call has completed, or None.

    Raises:
        FileExistsError: the folder is from a call with other arguments.
    """
    if not (out / _STATE).is_file():
        return None
    kept = _read(out / _STATE)
    if kept is None or kept["what"] != json.loads(json.dumps(what)):
        raise _is_there(out)
    (out / _STATE).unlink()
    return kept["done"], kept["in_fp8"]


def _read(state: Path) -> dict[str, Any] | None:
    """What `keep` wrote, or None."""
    try:
        kept = read_json(state)
    except (OSError, ValueError):
        return None
    return kept if {"what", "done", "in_fp8"} <= kept.keys() else None


def keep(
    partial: Path, what: dict[str, Any], done: Mapping[str, str], in_fp8: Sequence[str] | None
) -> None:
    """Writes what `begin` reads, by one rename."""
    beside = partial / f"{_STATE}.tmp"
    state = {"what": what, "done": done, "in_fp8": in_fp8}
    beside.write_text(json.dumps(state), encoding="utf-8")
    beside.replace(partial / _STATE)


def check_space(folder: Path, needed: int) -> None:
    """Checks that a disk has room for ``needed`` bytes.

    Raises:
        OSError: it has not (ENOSPC).
    """
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE:
        raise OSError(
            errno.ENOSPC,
            f"{folder} is on a disk with {show_size(free)} free and {show_size(needed)} are to be "
            "written",
        )


def finish(source: Source, work: Work, folder: Path, done: Mapping[str, str]) -> None:
    """Everything but the weights."""
    for path in sorted(source.directory.iterdir()):
        known = path.name in ("config.json", INDEX, SUMS, _STATE)
        if path.is_file() and not known and not _is_weights(path):
            shutil.copyfile(path, folder / path.name)
        # Of sentence-transformers, or chat templates; not the same weights in another format.
        elif path.is_dir() and path.name[0] != "." and not any(map(_is_weights, path.rglob("*"))):
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
    config = _undescribed(source.config)
    config["quantization_config"] = _config(work)
    _write_json(folder / "config.json", config)
    if work.layout == "modelopt":
        _write_json(folder / "hf_quant_config.json", _modelopt(work))
    names = {n: file for file, made in work.outputs.items() for _, parts in made for n in parts}
    if [*work.outputs] != [WHOLE]:
        total = work.bytes_after({})
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": names})
    sums = dict(done)
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in sums and name not in (SUMS, _STATE):
            sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    lines = [f"{digest}  {name}\n" for name, digest in sorted(sums.items())]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _is_weights(path: Path) -> bool:
    return path.suffix in _NOT_COPIED


def _undescribed(config: dict[str, Any]) -> dict[str, Any]:
    """A model's configuration without what says how it is quantized."""
    return {
        key: _undescribed(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in DESCRIPTIONS
    }


def _config(work: Work) -> dict[str, Any]:
    """The ``quantization_config`` of config.json."""
    if work.layout == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "group_size": NVFP4_BLOCK,
            "kv_cache_scheme": None,
            "ignore": work.ignored,
        }
    if work.layout == "gpt-oss":
        return {"modules_to_not_convert": list(_NOT_IN_MXFP4), "quant_method": "mxfp4"}
    layers: dict[str, FileScheme] = {}
    for name in work.quantized:
        scheme = work.scheme_of(name)
        layers[name] = (scheme.name, scheme.weights, scheme.inputs)
    return quantization_config(layers, work.ignored)


def _modelopt(work: Work) -> dict[str, Any]:
    return {
        "producer": {"name": "jitquant"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": NVFP4_BLOCK,
            "exclude_modules": work.ignored,
        },
    }


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
