# shellcheck shell=bash
# Sourced by the commands in scripts/. Finds a Python, keeps .venv in order, and sets
#   ROOT     the checkout
#   PYTHON   the interpreter to run
# The caller has set `set -euo pipefail`.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
VENV="$ROOT/.venv"
PYTHON=""

# Threads that wait for each other sleep. Spinning, they take the time of whoever they wait for when
# there is other work on the machine, and a run takes several times as long.
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"

say() { printf '%s\n' "$*" >&2; }
die() {
  say "error: $*"
  exit 1
}

# The first interpreter that is new enough and can make a virtual environment.
find_base_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
      >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# A .venv is usable if its own interpreter runs, is new enough, has pip, and was made at this path.
venv_usable() {
  [[ -f "$VENV/pyvenv.cfg" && -x "$VENV/bin/python" ]] || return 1
  "$VENV/bin/python" - "$VENV" >/dev/null 2>&1 <<'PY'
import importlib.util
import sys
from pathlib import Path

venv = Path(sys.argv[1])
scripts = (venv / "bin").glob("pip*")
heads = [path.read_text(errors="replace")[:512] for path in scripts]
ok = (
    sys.version_info >= (3, 10)
    and Path(sys.prefix).resolve() == venv.resolve()
    and importlib.util.find_spec("pip") is not None
    and all(str(venv) in head for head in heads)
)
sys.exit(not ok)
PY
}

make_venv() {
  local base
  base="$(find_base_python)" ||
    die "no Python >= 3.10 with the venv module was found; install one (Debian, Ubuntu: apt install python3-venv)"
  if [[ -e "$VENV" || -L "$VENV" ]]; then
    say ".venv is unusable; recreating it"
    rm -rf -- "$VENV"
  fi
  say "creating .venv with $("$base" --version)"
  "$base" -m venv "$VENV" || die "$base -m venv failed"
}

# What an install depends on, in one line.
environment_digest() {
  {
    printf '%s\n%s\n' "$ROOT" "$1"
    "$PYTHON" -VV
    cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt"
  } | "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Names of the requirements of the project and the named extras that are not installed.
missing_requirements() {
  "$PYTHON" "$ROOT/scripts/lib/missing.py" "$1"
}

# prepare_python EXTRAS [INTERPRETER]
#   Without INTERPRETER: .venv, created or updated if necessary.
#   With INTERPRETER: that one, unchanged; the caller handles what it lacks.
prepare_python() {
  local extras="$1" interpreter="${2:-}" stamp digest missing
  if [[ -n "$interpreter" ]]; then
    PYTHON="$(command -v "$interpreter")" || die "interpreter '$interpreter' not found"
    "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      die "$PYTHON is $("$PYTHON" --version 2>&1); 3.10 or newer is needed"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi

  if command -v flock >/dev/null 2>&1; then
    exec 9>"$ROOT/.venv.lock"
    flock 9
  fi
  venv_usable || make_venv
  PYTHON="$VENV/bin/python"
  stamp="$VENV/.jitquant-${extras//,/-}"
  digest="$(environment_digest "$extras")"
  if [[ "$(cat "$stamp" 2>/dev/null)" != "$digest" || -n "$(missing_requirements "$extras")" ]]; then
    say "installing jitquant[$extras] and its dependencies into .venv (takes minutes the first time)"
    if "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input --no-compile \
      --constraint "$ROOT/constraints.txt" --editable "$ROOT[$extras]"; then
      # The bytecode, which pip would make with one processor. Not all that is there is for this
      # version of Python.
      "$PYTHON" -m compileall -qq -j 0 "$VENV/lib" || true
      printf '%s\n' "$digest" >"$stamp"
    else
      missing="$(missing_requirements "$extras")"
      [[ -z "$missing" ]] ||
        die "pip could not install into .venv, and these are missing:" $missing
      say "pip failed, but all that is needed is installed already: going on with that"
      export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    fi
  fi
  if [[ -e /dev/fd/9 ]]; then
    exec 9>&-
  fi
}
