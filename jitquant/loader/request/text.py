"""A source that is given as text."""

from __future__ import annotations

from dataclasses import dataclass

from .sources import SUFFIXES


@dataclass(frozen=True)
class Source:
    """The text of a source instead of a file: for a notebook, or for generated kernels.

    It is stored as a file in the cache, which compiler messages and debuggers refer to. Its
    includes are searched in ``include_dirs``, not in the working directory.

    Attributes:
        text: CUDA or C++.
        suffix: ``".cu"``, or ``".cpp"`` for the C++ compiler.

    Raises:
        TypeError: the text is not a string.
        ValueError: the suffix is neither of these.
    """

    text: str
    suffix: str = ".cu"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"Source: the text is {type(self.text).__name__}; give a string.")
        if self.suffix not in SUFFIXES:
            raise ValueError(
                f"Source: suffix={self.suffix!r} is not compiled; {', '.join(SUFFIXES)} are."
            )

    def __repr__(self) -> str:
        first = self.text.strip().partition("\n")[0]
        return f"<Source of {len(self.text)} characters: {first[:40]!r}>"
