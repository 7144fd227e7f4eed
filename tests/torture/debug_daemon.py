"""`python -m tests.torture.debug_daemon serve ...` is `kvstored serve ...` with what the
environment asks for: failpoints (TORTURE_FAILPOINTS), a planted bug (TORTURE_MUTANT), a wall clock
that is off (TORTURE_WALL), and odd schedules (TORTURE_JITTER).
"""

from __future__ import annotations

import os

from kvstore_server.__main__ import main
from tests.torture import failpoints, jitter, mutants, wall

if __name__ == "__main__":
    mutants.plant(os.environ.get(mutants.VARIABLE, ""))
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    wall.bend(os.environ.get(wall.VARIABLE, ""))
    jitter.plant_daemon(os.environ.get(jitter.VARIABLE, ""))
    main()
