"""`python -m tests.torture.debug_daemon serve ...` is `kvstored serve ...` with what the
environment asks for: failpoints (TORTURE_FAILPOINTS) and a planted bug (TORTURE_MUTANT).
"""

from __future__ import annotations

import os

from kvstore_server.__main__ import main
from tests.torture import failpoints, mutants

if __name__ == "__main__":
    mutants.plant(os.environ.get(mutants.VARIABLE, ""))
    failpoints.arm(os.environ.get(failpoints.VARIABLE, ""))
    main()
