"""A disk that becomes slow is passed over, and used again once it has recovered; loads take what
was predicted. The bounded form of `python -m tests.audit.load_or_compute`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.audit import load_or_compute as audit

pytestmark = [pytest.mark.slow, pytest.mark.process]

LOADS = 12


def test_a_slow_disk_is_declined_and_accepted_again(tmp_path: Path) -> None:
    figures = audit.run(tmp_path, loads=LOADS, rates=audit.QUICK)
    asked = figures["declined_while_slow"][1]
    assert figures["loads_that_lost"] <= audit.LEARNING_MAX, figures
    assert figures["declined_while_slow"] == [asked, asked], figures
    assert figures["seconds_until_used_again"] <= audit.RECOVERY_S_MAX, figures
    # At the fast rate a busy machine is part of what is measured; the command judges it, too.
    assert figures["slow"]["error_p90"] <= audit.ERROR_P90_MAX, figures
    told = figures["daemon_counted"]
    assert told["lookups_declined"] >= asked, figures
    assert told["probes_of_the_disk"] >= 1, figures
    assert told["predicted_loads"] >= 2 * LOADS, figures
    assert told["predicted_loads_within_25_percent"] >= LOADS, figures
