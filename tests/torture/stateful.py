"""Stage G: Hypothesis chooses what happens, restarts among it, and a model tells what may be read.

Most of it on a daemon in one thread with a clock by hand (`stateful_life`), a smaller share on real
daemons that are killed with -9 (`stateful_process`). The seed decides everything: the same seed
gives the same examples; no database of examples is kept.
"""

from __future__ import annotations

import logging
import traceback

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.torture.base import Job, Outcome
from tests.torture.stateful_life import Life, Wrong
from tests.torture.stateful_process import Process

EXAMPLES, STEPS = 300, 60
PROCESSES, PROCESS_STEPS = 8, 25
STEPS_SHOWN = 3_000
"""Letters of the steps that led to a finding."""


class Stateful:
    name = "stateful"
    what = "Hypothesis chooses puts, reads, faults and ends of all kinds; a model tells what may be"

    def run(self, job: Job) -> Outcome:
        outcome = Outcome()
        logging.disable(logging.CRITICAL)  # faults are what it is about
        examples = job.scale.of(EXAMPLES, at_least=5)

        def played() -> None:
            job.progress(outcome.counts["examples"], examples, outcome)

        told = {"counts": outcome.counts, "played": (played,)}
        self._play(job, type("Life", (Life,), told), examples, STEPS, outcome)
        if not job.enough(outcome):
            fields = {"job": job, "outcome": outcome}
            process = type("Process", (Process,), fields)
            self._play(job, process, job.scale.of(PROCESSES, at_least=3), PROCESS_STEPS, outcome)
        outcome.trials = outcome.counts["examples"]
        return outcome

    def _play(
        self,
        job: Job,
        machine: type[RuleBasedStateMachine],
        examples: int,
        steps: int,
        outcome: Outcome,
    ) -> None:
        chosen = settings(
            max_examples=examples,
            stateful_step_count=steps,
            database=None,
            deadline=None,
            derandomize=False,
            print_blob=False,
            report_multiple_bugs=False,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        try:
            run_state_machine_as_test(seed(job.seed)(machine), settings=chosen)
        except Wrong as error:
            outcome.wrong.append(_told(error))
        except Exception as error:
            outcome.failed.append(_told(error))


def _told(error: Exception) -> str:
    """In one line: what, where, and the steps that led to it."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    steps = " ".join(" ".join(getattr(error, "__notes__", [])).split())
    return f"{type(error).__name__}: {error} ({where.name}:{where.lineno}) {steps[-STEPS_SHOWN:]}"
