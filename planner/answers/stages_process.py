"""Plans a job over boxes in its own process: `python -m windlass.planner.answers.stages_process`."""

import json
import sys
from typing import Any

from windlass.actors.timeline import SIMULATED_FOLDER
from windlass.planner.planning import RefusedError, answer_question, arguments_of
from windlass.planner.stages import StagesDoNotFitError, StagesError, StagesRequest, plan_stages


def main() -> None:
    """Answers the question that the command line names. The answer has the plan as `stages`. The exit code is 0."""
    files = arguments_of(sys.argv[1:], "Plan a job over several boxes.")

    def answer() -> dict[str, Any]:
        request = StagesRequest.from_json(json.loads(files.question.read_text()))
        try:
            plan = plan_stages(request, timeline_dir=files.result.parent / SIMULATED_FOLDER)
            return {"stages": plan.to_json()}
        except StagesDoNotFitError as error:
            raise RefusedError("does_not_fit", str(error), None) from None
        except StagesError as error:
            raise RefusedError("not_divisible", str(error), None) from None

    answer_question(files, answer)


if __name__ == "__main__":
    main()
