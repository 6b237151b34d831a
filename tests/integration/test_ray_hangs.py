"""Processes that hang or die at a known moment of a step, on real Ray: a named error in time, and the job resumes."""

import json
import os
import re
import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from tests.integration.resume_stage import NUM_STEPS, ResumeStage, Undisturbed, resume_stage

# Seconds: timeouts of the job's waits and of the runner's silence; long enough for a busy machine.
DEADLINE_S = 10
STEP = 6
SABOTAGE = Path(__file__).parent / "sabotage"
VICTIMS = ("runner", "gpu-0", "optimizer-0", "ssd-0", "ssd-1")
# The first message of this type and phase about a step that reaches the runner, or that one which reaches it carries.
MOMENTS = {
    "forward": ("BlockComputed", "forward"),
    "backward": ("GradReady", None),
    "update": ("BlockUpdated", None),
    "commit": ("StoreCommitted", None),
}


@pytest.fixture(scope="module")
def stage(direct_home: Path) -> Iterator[ResumeStage]:
    path = os.pathsep.join(filter(None, [str(SABOTAGE), os.environ.get("PYTHONPATH")]))
    with resume_stage(direct_home, {"PYTHONPATH": path, "TEST_DEADLINE_S": str(DEADLINE_S)}) as stage:
        yield stage


CASES = [
    pytest.param(*case, id="-".join(getattr(each, "name", each) for each in case))
    for case in product(VICTIMS, MOMENTS, (signal.SIGSTOP, signal.SIGKILL))
]


@pytest.mark.long
@pytest.mark.parametrize(("victim", "moment", "sent"), CASES)
def test_a_job_goes_on_after(
    stage: ResumeStage, undisturbed: Undisturbed, victim: str, moment: str, sent: signal.Signals
) -> None:
    job_id = stage.submit()
    message, phase = MOMENTS[moment]
    fault = {"victim": victim, "message": message, "phase": phase, "step": STEP, "signal": sent}
    file = stage.folder(job_id) / "fault.json"
    file.write_text(json.dumps(fault))
    stage.finish(job_id)
    assert not file.exists(), "the moment never came"
    job = stage.job(job_id)
    assert (job.attempt, job.step) == (2, NUM_STEPS)
    assert stage.losses(job_id) == undisturbed.losses
    assert stage.model(job_id) == undisturbed.model
    (lost,) = [message for message in stage.messages(job_id) if message.startswith("Attempt 1 was lost: ")]
    assert_named(lost, victim, sent)
    (resumed,) = [message for message in stage.messages(job_id) if message.startswith("Resuming after step ")]
    # The first block of a step is computed while the last blocks of the previous step are still updated.
    first = STEP - 2 if moment == "forward" else STEP - 1
    assert first <= int(resumed.rpartition(" ")[2]) <= STEP


def assert_named(lost: str, victim: str, sent: signal.Signals) -> None:
    if victim == "runner":
        reason = f"its runner hung: it gave no sign of life for {DEADLINE_S} s" if sent is signal.SIGSTOP else "ended"
        assert reason in lost
    elif sent is signal.SIGKILL:
        assert f"the process of {victim} died" in lost
    else:
        assert victim in lost
        silent_s = [float(text) for text in re.findall(r" has been silent for ([\d.]+) s", lost)]
        assert silent_s
        assert min(silent_s) >= DEADLINE_S
