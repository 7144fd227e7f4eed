"""`python -m tests.torture.debug_daemon serve ...` is `kvstored serve ...` with what the
environment asks for: failpoints (TORTURE_FAILPOINTS), a planted bug (TORTURE_MUTANT), and a wall
clock that is off (TORTURE_WALL).
"""

from __future__ import annotations

import os

from kvstore_server.__main__ import main
from tests.torture import failpoints, mutants, wall

if __name__ == "__main__":
    mutants.plant(os.environ.get(mutants.VARIABLE, ""))
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    wall.bend(os.environ.get(wall.VARIABLE, ""))
    main()
