"""Print the names of the requirements that the running interpreter does not have.

``python missing.py test,demo`` looks at the project's dependencies and those of the named extras.
Only presence is checked: versions are pip's affair.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def missing(extras: list[str]) -> list[str]:
    """Return the names, in the order of the file."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    absent = []
    for requirement in wanted:
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        name = match.group() if match else requirement
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            absent.append(name)
    return list(dict.fromkeys(absent))


if __name__ == "__main__":
    print("\n".join(missing([extra for extra in "".join(sys.argv[1:]).split(",") if extra])))
