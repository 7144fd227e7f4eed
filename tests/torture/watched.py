"""`python -m tests.torture.watched ARGUMENTS` runs a program of ours, and writes down what it
unpickles, or unmarshals other than compiled modules: the environment names the program
(TORTURE_WATCHED) and the file (TORTURE_WATCH_FILE).

The first line is of a pickle of its own: a watch that sees nothing would prove nothing.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import PurePosixPath
from types import FrameType

PROGRAM = "TORTURE_WATCHED"
FILE = "TORTURE_WATCH_FILE"
OWN = "pickle.find_class pathlib.PurePosixPath"


class Watch:
    """An audit hook: it only notes, since what it raised might be swallowed."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "pickle.find_class":
            self._note(f"{event} {'.'.join(map(str, arguments))}")
        elif event == "marshal.loads":
            caller: FrameType | None = sys._getframe(1)
            if caller is None or "importlib" not in caller.f_code.co_filename:
                self._note(f"{event} by {caller and caller.f_code.co_filename}")

    def _note(self, line: str) -> None:
        os.write(self._fd, f"{line}\n".encode())


def main() -> None:
    sys.addaudithook(Watch(os.environ[FILE]))
    pickle.loads(pickle.dumps(PurePosixPath("x")))  # noqa: S301
    if os.environ[PROGRAM] == "kvstored":
        from kvstore_server.__main__ import main as program
        from tests.torture import failpoints, mutants

        mutants.plant(os.environ.get(mutants.VARIABLE, ""))
        failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
        program()
    else:
        from kvstore.cli import main as tool

        tool()


if __name__ == "__main__":
    main()
