"""Messages between boxes that are lost: the error names what is missing, and the next attempt goes on."""

import dataclasses
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support import training
from tests.support.actors.stage_runs import STAGES, half_exported, is_export, run, run_attempt, train
from tests.support.actors.whole_jobs import Run, grouped, job
from tests.support.training import boxes_of
from windlass.actors.gpu_worker.edges.shared_params import SharedParams
from windlass.actors.gpu_worker.edges.stage_edges import StageEdges
from windlass.actors.messages import Crossing, Message, OfferParams, OfferSpan, OfferTaken, Phase, PullSpan, SpanPulled
from windlass.actors.optimizer.worker import CpuOptimizer
from windlass.actors.runtime.local_link import LocalLink
from windlass.storage.ids import Attempt, BlockIndex, Precision

# By what is lost of a step: the error.
LOST = {
    "results": r"the results of box (head|attic) for the .* in step 2, group \d",
    "params": r"the embedding's params from box head in step 2",
    "gradient": r"the head's gradient of the embedding from box attic in step 2",
}


def contents(crossing: Crossing) -> str:
    """Returns what crosses, as `LOST` names it."""
    if not crossing.is_shared:
        return "results"
    return "gradient" if crossing.phase is Phase.BACKWARD else "params"


@pytest.mark.long
@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("results", OfferSpan),
        *(
            pytest.param(lost, message, marks=pytest.mark.long)
            for lost, message in product(LOST, (OfferSpan, PullSpan, SpanPulled))
            if (lost, message) != ("results", OfferSpan)
        ),
    ],
)
def test_what_the_link_loses_is_named_and_the_next_attempt_goes_on(
    tmp_path: Path, lost: str, message: type[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {
        "precision": Precision.BF16,
        "evaluate_every": None,
        "total_steps": 3,
        "tied": lost != "results",
    }
    whole = run(tmp_path / "whole", **changes)
    num_left = 3 if lost == "results" else 1
    spec = dataclasses.replace(grouped(job(tmp_path / "cut", lanes=1, **changes), 2), box_names=("head", "attic"))

    def losing(original: Callable[..., None]) -> Callable[..., None]:
        def call(self: Any, sent: Message, *args: Any) -> None:
            nonlocal num_left
            if isinstance(sent, message) and sent.step == 2 and contents(sent.crossing) == lost:
                num_left -= 1
                if num_left == 0:
                    return
            original(self, sent, *args)

        return call

    monkeypatch.setattr(LocalLink, "post", losing(LocalLink.post))
    for end in (StageEdges, SharedParams):
        monkeypatch.setattr(end, "take", losing(end.take))
    outcome = run_attempt(*(dataclasses.replace(each, deadline_s=10.0) for each in boxes_of(spec, STAGES["2-3"])))
    assert (outcome["status"], outcome["error"]["code"]) == ("interrupted", "training_stalled")
    told = outcome["error"]["message"]
    assert re.search(f"{LOST[lost]}; that box or the link to it is stuck", told), told
    train(dataclasses.replace(spec, attempt=Attempt(2)), STAGES["2-3"])
    Run.of(spec).assert_equals(whole)


@pytest.mark.long
@pytest.mark.parametrize(("lost", "is_stuck"), [(OfferSpan, True), (OfferTaken, False)])
def test_params_that_one_gpu_worker_offers_to_another_are_lost(
    tmp_path: Path, lost: type[Message], monkeypatch: pytest.MonkeyPatch, *, is_stuck: bool
) -> None:
    """Without the word that a chunk was copied, its slot stays in use, and the other one is enough."""
    monkeypatch.setattr(training, "CHUNK_NUMEL", 2048)
    changes: dict[str, Any] = {"evaluate_every": None, "total_steps": 3, "tied": True, "num_microbatches": 4}
    whole, num_left, take = run(tmp_path / "whole", **changes), 1, SharedParams.take
    spec = dataclasses.replace(grouped(job(tmp_path / "cut", lanes=1, **changes), 1), box_names=("head", "attic"))

    def losing(self: SharedParams, message: Any) -> None:
        nonlocal num_left
        if isinstance(message, lost) and message.step == 2 and self.params(BlockIndex(0)) is not None:
            num_left -= 1
            if num_left == 0:
                return
        take(self, message)

    monkeypatch.setattr(SharedParams, "take", losing)
    ranks = (1, 2)
    specs = boxes_of(spec, STAGES["2-3"], ranks)
    outcome = run_attempt(*(dataclasses.replace(each, deadline_s=10.0 if is_stuck else 60.0) for each in specs))
    assert num_left <= 0
    if is_stuck:
        assert (outcome["status"], outcome["error"]["code"]) == ("interrupted", "training_stalled")
        assert (
            "the embedding's params from box head in step 2; that box, the link to it or b1/gpu-0 is stuck"
            in (outcome["error"]["message"])
        )
        train(dataclasses.replace(spec, attempt=Attempt(2)), STAGES["2-3"], ranks)
    Run.of(spec).assert_equals(whole)


@pytest.mark.long
@pytest.mark.parametrize("lost", [OfferParams, OfferSpan, PullSpan, SpanPulled, OfferTaken])
def test_params_that_are_lost_on_their_way_to_an_export_are_named_and_the_next_attempt_exports(
    tmp_path: Path, lost: type[Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, Any] = {"precision": Precision.BF16, "num_validation_examples": 0, "total_steps": 2}
    whole, num_left = run(tmp_path / "whole", **changes), 1
    spec = job(tmp_path / "cut", lanes=1, **changes)

    def losing(original: Callable[..., None]) -> Callable[..., None]:
        def call(self: Any, message: Message) -> None:
            nonlocal num_left
            if isinstance(message, lost) and is_export(message):
                num_left -= 1
                if num_left >= 0:
                    return
            original(self, message)

        return call

    monkeypatch.setattr(CpuOptimizer, "post", losing(CpuOptimizer.post))
    monkeypatch.setattr(LocalLink, "post", losing(LocalLink.post))
    outcome = run_attempt(*(dataclasses.replace(each, deadline_s=5.0) for each in boxes_of(spec, STAGES["2-3"])))
    if lost is OfferTaken:  # the slot of one chunk stays in use
        assert outcome["status"] == "succeeded"
        return
    assert (outcome["status"], outcome["error"]["code"]) == ("interrupted", "training_stalled")
    told = outcome["error"]["message"]
    assert re.search(
        r"ChunkKey\(block=\d, chunk=\d\) of step 2, from box 1; that box or the link to it is stuck", told
    ), told
    assert half_exported(spec) == []
    train(dataclasses.replace(spec, attempt=Attempt(2)), STAGES["2-3"])
    Run.of(spec).assert_equals(whole)
