"""Measures the times that a plan lacks, in a process of its own, so that other plans are made meanwhile.

`python -m windlass.planner.answers.measure_process --question FILE --result FILE`
"""

import json
import sys
from typing import Any

from windlass.planner.answers.what_if import lacking_times_of_changes
from windlass.planner.planning import (
    answer_question,
    arguments_of,
    lacking_times,
    measure_all,
    question_of,
    questions_by_number,
)
from windlass.planner.profiling import read_config
from windlass.planner.question import PlanRequest, Profiles, different_needs, disturbed_path, progress_path
from windlass.storage.files import write_atomically


def main() -> None:
    """Measures, and stores the times for the plan. The exit code is 0.

    Meanwhile the file of `progress_path` says what is measured: `message`, `done` and `total`. The answer has the
    number that was `measured`, and says whether no other job computed meanwhile (`alone`).
    """
    options = arguments_of(sys.argv[1:], "Measure a model's blocks for a plan.")
    progress, disturbed = progress_path(options.result), disturbed_path(options.result)

    def see(what: str, done: int, total: int) -> None:
        told = {"message": f"measuring {what}", "done": done, "total": total}
        write_atomically(progress, json.dumps(told))

    def measure() -> dict[str, Any]:
        request = PlanRequest.from_json(json.loads(options.question.read_text()))
        config = read_config(request.model_dir, request.training.sequence_length)
        question = question_of(request, config, options.measuring, is_alone=lambda: not disturbed.exists())
        profiles = Profiles(question)
        # Another plan's measurement may have stored some meanwhile.
        needs = lacking_times(questions_by_number(question), profiles)
        if request.what_if:
            needs = different_needs([*needs, *lacking_times_of_changes(question, profiles)])
        measure_all(needs, profiles, see=see)
        return {"measured": len(needs), "alone": not disturbed.exists()}

    answer_question(options, measure)


if __name__ == "__main__":
    main()
