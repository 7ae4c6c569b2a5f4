"""``jitquant record`` and ``bundle --from``: what a run used, ready where there is no compiler."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from loader.toys import copy_cache, entries, finish, python, write_plain
from quick import in_quick

import jitquant
from jitquant.loader import LoaderError
from jitquant.loader.request.plan import Request
from jitquant.loader.request.used import VARIABLE, note_use, read_manifest, write_manifest

from .conftest import Built, Run, at_most_bytes

ROOT = Path(jitquant.__file__).resolve().parents[1]
#: One module, a variant of it in a forked child, and a kernel with a binding.
USE = """
import os, sys
from jitquant.loader import Loader
loader = Loader(native=lambda: ())
plain, kernel = sys.argv[1:]
for _ in range(2):
    assert loader.get("plain", [plain]).library.factor() == 3
pid = os.fork()
if pid == 0:
    loader.get("plain", [plain], cxx_flags=["-DVARIANT"], include_dirs=[os.path.dirname(plain)])
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
loader.get("toy", [kernel])
"""
#: As a manifest has it.
MODULE = {
    "name": "k",
    "sources": ["k.cu", "./own.cu"],
    "include_dirs": ["/elsewhere"],
    "cuda_flags": [],
    "cxx_flags": [],
    "archs": None,
    "built_for": ["90a"],
}
#: What would start a compiler, or any process, is refused.
READY = """
import json, os, sys
started = []
def hook(event, arguments):
    if event.startswith(("subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system")):
        started.append([event, repr(arguments)])
        raise RuntimeError(f"{event} {arguments}")
import torch
sys.addaudithook(hook)
from jitquant.loader import Loader, NoBuildError
loader = Loader(native=lambda: ())
modules = loader.warmup(manifest=sys.argv[1])
plain, kernel = sys.argv[2:]
again = [
    loader.get("plain", [plain]),
    loader.get("plain", [plain], cxx_flags=["-DVARIANT"], include_dirs=[os.path.dirname(plain)]),
    loader.get("toy", [kernel]),
]
assert again == list(modules.values())
try:
    loader.get("plain", [plain], cxx_flags=["-DANOTHER"])
except NoBuildError as error:
    refused = str(error)
print(json.dumps({
    "started": started,
    "modules": {name: str(module.path) for name, module in modules.items()},
    "scaled": modules["toy"].scale(torch.ones(2), 2.0).tolist(),
    "refused": refused,
}))
"""


@pytest.mark.slow
def test_what_a_run_used_is_ready_where_nothing_can_compile(
    run: Run, built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    plain = write_plain(work / "plain")
    monkeypatch.setenv("JITQUANT_CACHE_DIR", str(copy_cache(built.cache, tmp_path / "made")))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    manifest, bundle = work / "used.json", tmp_path / "bundle"
    files = [str(plain), str(built.source)]
    done = run("record", "-o", manifest, "--", sys.executable, "-c", USE, *files)
    assert done.code == 0, done.err
    assert done.err.endswith(f"3 modules used, in {manifest}\n")
    stated = json.loads(manifest.read_text())["modules"]
    assert [m["sources"] for m in stated] == [["./plain/plain.cpp"]] * 2 + [[str(built.source)]]
    assert [m["cxx_flags"] for m in stated] == [[], ["-DVARIANT"], []]
    before = entries(tmp_path / "made")
    done = run("bundle", "--from", manifest, "-o", bundle)
    assert done.code == 0, done.err
    assert entries(tmp_path / "made") == before  # exactly what the run has built

    nothing = {"PATH": str(tmp_path), "CUDA_HOME": "", "CXX": "", "CUDA_PATH": ""}
    process = python(
        READY.replace("sys.argv[1]", repr(str(manifest))).replace("sys.argv[2:]", repr(files)),
        tmp_path / "none",
        **nothing,
        JITQUANT_BUNDLES=str(bundle),
        JITQUANT_NO_BUILD="1",
    )
    out, said = finish(process)
    found = json.loads(out)
    assert found["started"] == []
    assert list(found["modules"]) == ["plain", "plain (2)", "toy"]
    assert all(Path(path).is_relative_to(bundle) for path in found["modules"].values())
    assert found["scaled"] == [6.0, 6.0]
    assert "JITQUANT_NO_BUILD=1 forbids: no C++ compiler" in found["refused"]
    # Of the one that is refused alone.
    assert all("here -DANOTHER" in line for line in said.splitlines())
    assert not (tmp_path / "none").exists()


def test_the_architectures_can_be_others(run: Run, tmp_path: Path) -> None:
    manifest = tmp_path / "used.json"
    manifest.write_text(json.dumps({"format": 1, "modules": [MODULE]}))
    (request,) = read_manifest(manifest, as_built=True).values()
    assert request.sources == ("k.cu", tmp_path / "own.cu")
    assert request.archs == ("90a",)
    assert read_manifest(manifest, as_built=False)["k"].archs is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", '{"format": 2}', '{"format": 1, "modules": [{}]}'),
        *(
            json.dumps({"format": 1, "modules": [{**MODULE, **wrong}]})
            for wrong in (
                {"name": "../../evil"},
                {"name": 5},
                {"sources": "./k.cu"},
                {"sources": [{"text": 5}]},
                {"include_dirs": "include"},
                {"cuda_flags": "-DX"},
                {"cxx_flags": [5]},
                {"built_for": 90},
            )
        ),
    ],
)
def test_what_is_no_manifest_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    manifest = tmp_path / "used.json"
    manifest.write_text(text)
    done = run("bundle", "--from", manifest, "-o", tmp_path / "bundle")
    assert done.code == 1
    assert f"{manifest} is not a manifest of `jitquant record`" in done.err


def test_a_record_that_is_not_written_whole_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, manifest = tmp_path / "notes", tmp_path / "used.json"
    monkeypatch.setenv(VARIABLE, str(notes))
    note_use(Request("first", ("first.cu",)), ["90a"])
    with at_most_bytes(2000), pytest.raises(LoaderError, match=r"only a part was written"):
        note_use(Request("large", ("large.cu",), cxx_flags=("-D" + "X" * 3000,)), ["90a"])
    note_use(Request("last", ("last.cu",)), ["90a"])
    assert write_manifest(notes, manifest) == (["first", "last"], 1)
    before = manifest.read_text()
    with at_most_bytes(100), pytest.raises(OSError, match=r"File too large: '.*/used\.json'"):
        write_manifest(notes, manifest)
    assert manifest.read_text() == before
    assert sorted(tmp_path.iterdir()) == [notes, manifest]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_manifest(notes, pipe)  # as to /dev/stdout
        assert os.read(reader, 65536).decode() == before
    finally:
        os.close(reader)


def test_the_exit_code_is_that_of_the_command(run: Run, tmp_path: Path) -> None:
    manifest = tmp_path / "used.json"
    assert run("record", "-o", manifest, "--", sys.executable, "-c", "exit(7)").code == 7
    assert json.loads(manifest.read_text()) == {"format": 1, "modules": []}
    kill = "import os; os.kill(os.getpid(), 9)"
    assert run("record", "-o", manifest, "--", sys.executable, "-c", kill).code == 137


@pytest.mark.parametrize("before", [None, "", "old"])
def test_a_command_that_cannot_be_started_leaves_what_there_was(
    run: Run, tmp_path: Path, before: str | None
) -> None:
    manifest, script = tmp_path / "used.json", tmp_path / "script"
    script.write_text("not executable")
    if before is not None:
        manifest.write_text(before)
    for command, why in ((tmp_path / "absent", "No such file"), (script, "Permission denied")):
        done = run("record", "-o", manifest, "--", command)
        assert done.code == 1
        assert f"error: record: {str(command)!r} cannot be started: {why}" in done.err
        assert (manifest.read_text() if manifest.exists() else None) == before


def test_a_manifest_that_cannot_be_written_is_said_before_the_run(run: Run, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    done = run("record", "-o", tmp_path / "absent" / "used.json", "--", "touch", ran)
    assert done.code == 1
    assert "No such file or directory" in done.err
    assert not ran.exists()


@pytest.mark.parametrize("number", in_quick(1, [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]))
def test_a_server_that_is_stopped_leaves_its_manifest(tmp_path: Path, number: int) -> None:
    plain = write_plain(tmp_path / "plain")
    server = (
        "import sys, time; from jitquant.loader import Loader\n"
        "Loader(native=lambda: ()).get('plain', [sys.argv[1]])\n"
        "print('ready', flush=True); time.sleep(100)"
    )
    manifest = tmp_path / "used.json"
    command = [sys.executable, "-m", "jitquant", "record", "-o", str(manifest), "--"]
    process = subprocess.Popen(
        [*command, sys.executable, "-c", server, str(plain)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        assert process.wait(300) != 0
    (module,) = json.loads(manifest.read_text())["modules"]
    assert module["name"] == "plain"
