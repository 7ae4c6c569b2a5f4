"""Terminates the compilers of a process that was killed, which it cannot do itself."""

from __future__ import annotations

import contextlib
import subprocess

# It is told to go, since a forked child of the builder may hold the other end of the pipe.
_SCRIPT = """
groups=
while read -r word group; do
  case $word in
    start) groups="$groups $group" ;;
    end)
      left=
      for one in $groups; do [ "$one" = "$group" ] || left="$left $one"; done
      groups=$left ;;
    go) exit 0 ;;
  esac
done
for one in $groups; do kill -s KILL -- "-$one"; done
"""


class Watchdog:
    """Within the block, a shell waits for the end of this process and kills its compilers.

    A parent-death signal would arrive when the building thread ends, and would not reach processes
    that a compiler has started.
    """

    def __enter__(self) -> Watchdog:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,  # a Ctrl-C is not for it
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._tell("go")
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()

    def started(self, group: int) -> None:
        """Registers a process group to be killed if this process dies."""
        self._tell(f"start {group}")

    def ended(self, group: int) -> None:
        """Unregisters a group that has ended; its number may be reused."""
        self._tell(f"end {group}")

    def _tell(self, line: str) -> None:
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError):
            self._shell.stdin.write(f"{line}\n".encode())
