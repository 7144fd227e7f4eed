"""The daemons of the torture: real processes, with the job's planted bug and failpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.daemon import Daemon, make_daemon
from tests.torture import failpoints as points
from tests.torture import mutants
from tests.torture.base import Job

MODULE = "tests.torture.debug_daemon"


def daemon_of(
    job: Job,
    folder: Path,
    *,
    failpoints: str = "",
    argv_prefix: tuple[str, ...] = (),
    **settings: Any,
) -> Daemon:
    """A daemon that is not started yet, in `folder`, which is there. `failpoints` as in
    `tests.torture.failpoints`; change `daemon.environ` to have others after a restart.
    """
    environ = {mutants.VARIABLE: job.mutant, points.VARIABLE: failpoints}
    daemon = make_daemon(folder, environ=environ, argv_prefix=argv_prefix, **settings)
    daemon.module = MODULE if job.mutant or failpoints else daemon.module
    return daemon
