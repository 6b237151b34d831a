"""Plans of a job over several boxes, as the service asks for them."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.planner.stage_jobs import few_ways
from tests.support.training import NUM_VALIDATION_EXAMPLES, make_spec
from windlass.actors.messages import SpanKind
from windlass.actors.timeline.boxes import names_of_boxes
from windlass.actors.timeline.span_files import held_steps, load_step
from windlass.engine.model.layout import ModelLayout
from windlass.planner.answers import stages_process
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.hardware.hardware import Hardware, example_machines
from windlass.planner.hardware.yaml_files import load
from windlass.planner.planning.job_planning import question_of
from windlass.planner.question.kept_shapes import KeptShapes
from windlass.planner.stages import job_stages
from windlass.planner.stages.box_search import Choice, StagesError, best_of_choices
from windlass.planner.stages.job_stages import StagesDoNotFitError, plan_stages
from windlass.planner.stages.splits import PlannedStages
from windlass.planner.stages.stages_plan import StagesPlan
from windlass.planner.stages.stages_request import PairRate, RequestedBox, StagesRequest

NUM_BLOCKS = 5
_SHAPES = KeptShapes()  # so that the model is profiled once


@pytest.fixture(scope="module", autouse=True)
def _few_ways() -> Iterator[None]:
    """Leaves two options for activations, so that programs are solved quickly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            job_stages, "question_of", lambda request, config: replace(question_of(request, config), ways=few_ways)
        )
        yield


@pytest.fixture(scope="module")
def machine() -> Hardware:
    return load(Hardware, example_machines()["rtx4090-server"])


@pytest.fixture(scope="module")
def request_for_two(tmp_path_factory: pytest.TempPathFactory, machine: Hardware) -> StagesRequest:
    spec = make_spec(tmp_path_factory.mktemp("job") / "root", num_microbatches=2)
    return StagesRequest(
        model_dir=Path(spec.model_dir),
        layout_file=Path(spec.layout_file),
        dataset_dir=Path(spec.dataset_dir),
        training=spec.training,
        num_validation_examples=NUM_VALIDATION_EXAMPLES,
        boxes=(box("head", machine), box("attic", machine)),
        rates=both_ways("head", "attic", 1.25e9),
    )


@pytest.fixture(scope="module")
def searched(request_for_two: StagesRequest) -> tuple[StagesPlan, PlannedStages]:
    """A plan, and what the search has found for it."""
    found: list[PlannedStages] = []

    def search(choices: Sequence[Choice]) -> PlannedStages:
        planned = best_of_choices(choices)
        assert planned is not None
        found.append(planned)
        return planned

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_stages, "best_of_choices", search)
        return plan_stages(request_for_two, _SHAPES), found[0]


@pytest.fixture(scope="module")
def plan(searched: tuple[StagesPlan, PlannedStages]) -> StagesPlan:
    return searched[0]


def both_ways(box: str, other: str, bytes_per_s: float) -> tuple[PairRate, ...]:
    return tuple(
        PairRate(source=source, target=target, bytes_per_s=bytes_per_s)
        for source, target in ((box, other), (other, box))
    )


def box(name: str, hardware: Hardware | None, **changes: Any) -> RequestedBox:
    facts: dict[str, Any] = {"num_optimizers": 1, "host_memory_nbytes": None, "device_memory_nbytes": None}
    return RequestedBox(name=name, hardware=hardware, **(facts | changes))


def test_all_boxes_have_blocks_and_the_first_one_those_at_the_beginning(plan: StagesPlan) -> None:
    assert [stage.box for stage in plan.stages] == ["head", "attic"]
    assert plan.stages[-1].stop_block == NUM_BLOCKS
    assert plan.step_s is not None
    assert plan.notes == ()
    for stage in plan.stages:
        assert stage.arena_nbytes is not None
        assert stage.planned_device_nbytes is not None
        assert stage.peak_gib["host"] * 2**30 > stage.arena_nbytes


def test_boxes_of_a_plan_commit_at_once_in_equal_groups(plan: StagesPlan) -> None:
    assert len({stage.placement.commit_every for stage in plan.stages}) == 1
    assert len({stage.placement.group_size for stage in plan.stages}) == 1


@pytest.mark.parametrize(
    ("of_request", "of_cards", "expected", "is_told"),
    [(None, None, 1.25e8, True), (5e8, None, 5e8, False), (None, 0.25, 2.5e8, False), (5e8, 0.25, 5e8, False)],
)
def test_network_that_is_not_known_is_assumed_and_told(
    request_for_two: StagesRequest,
    machine: Hardware,
    searched: tuple[StagesPlan, PlannedStages],
    monkeypatch: pytest.MonkeyPatch,
    of_request: float | None,
    of_cards: float | None,
    expected: float,
    *,
    is_told: bool,
) -> None:
    def search(choices: Sequence[Choice]) -> PlannedStages:
        [choice] = choices
        assert [(number, each.kind.network_bytes) for each, number in choice] == [(2, pytest.approx(expected))]
        return searched[1]

    monkeypatch.setattr(job_stages, "best_of_choices", search)
    boxes = tuple(box(name, with_part(machine, network_gb_per_s=of_cards)) for name in ("head", "attic"))
    rates = () if of_request is None else both_ways("head", "attic", of_request)
    plan = plan_stages(replace(request_for_two, boxes=boxes, rates=rates), _SHAPES)
    told = "the rate of the network between the boxes is not known; 1 Gbit/s are assumed"
    assert [note.partition(". ")[0] for note in plan.notes] == ([told] if is_told else [])


def test_boxes_that_were_not_measured_share_the_layers_evenly(
    request_for_two: StagesRequest, machine: Hardware
) -> None:
    boxes = (box("head", machine), box("attic", None, num_optimizers=3, host_memory_nbytes=2**30))
    plan = plan_stages(replace(request_for_two, boxes=boxes))
    assert [stage.box for stage in plan.stages] == ["head", "attic"]
    assert plan.stages[-1].stop_block == NUM_BLOCKS
    assert plan.step_s is None
    assert (plan.num_microbatches, plan.group_size, plan.num_rounds) == (2, 1, 2)
    assert (plan.stages[1].num_optimizers, plan.stages[1].host_memory_nbytes) == (3, 2**30)
    assert [stage.arena_nbytes for stage in plan.stages] == [None, None]
    assert "attic was not measured: run `windlass doctor` there" in plan.notes[0]


def test_model_that_cannot_be_planned_is_divided_evenly(
    request_for_two: StagesRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise RuntimeError("shapes that depend on the data")

    monkeypatch.setattr(job_stages, "question_of", refuse)
    plan = plan_stages(request_for_two)
    assert plan.step_s is None
    assert "RuntimeError: shapes that depend on the data" in plan.notes[0]


def test_job_that_does_not_fit_is_told_which_box_lacks_what(request_for_two: StagesRequest) -> None:
    first, second = request_for_two.boxes
    little = replace(second, device_memory_nbytes=1000)
    with pytest.raises(StagesDoNotFitError) as raised:
        plan_stages(replace(request_for_two, boxes=(first, little)), _SHAPES)
    told = str(raised.value)
    assert "box attic lacks" in told
    assert "GPU memory" in told
    assert "head" not in told, "it has room for all layers but one"


def test_one_box_has_all_blocks_and_a_plan_as_a_job_on_one_box_has(request_for_two: StagesRequest) -> None:
    request = replace(request_for_two, boxes=request_for_two.boxes[:1], rates=())
    plan = plan_stages(request, _SHAPES)
    [stage] = plan.stages
    assert (plan.boxes, tuple(stage.stage), plan.is_over_several) == (("head",), (0, NUM_BLOCKS), False)
    assert plan.notes == (), "no network is between boxes"
    assert plan.step_s is not None
    assert stage.arena_nbytes is not None
    assert stage.busy_s is not None, "a job that has come to one box is planned anew by it"
    assert stage.busy_s["compute"] > 0
    assert stage.choices is not None
    assert stage.choices["kept_grads_on_ssd"] == 0
    assert StagesPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    little = replace(request.boxes[0], device_memory_nbytes=1000)
    with pytest.raises(StagesDoNotFitError, match="box head lacks"):
        plan_stages(replace(request, boxes=(little,)), _SHAPES)
    unmeasured = plan_stages(replace(request, boxes=(replace(little, hardware=None),)))
    assert unmeasured.stages[0].arena_nbytes is None
    assert unmeasured.notes[0].startswith("the job goes on without a new plan, because head was not measured")


@pytest.mark.long
def test_boxes_that_fit_are_chosen_of_several(request_for_two: StagesRequest, machine: Hardware) -> None:
    small = box("small", machine, device_memory_nbytes=1000)
    full = box("full", machine, ssd_nbytes=10)
    boxes = (box("head", machine), small, full, box("attic", machine))
    plan = plan_stages(replace(request_for_two, boxes=boxes, num_boxes=2), _SHAPES)
    assert [stage.box for stage in plan.stages] == ["head", "attic"]


@pytest.mark.long
def test_fastest_boxes_are_chosen_and_of_equal_ones_the_first(
    request_for_two: StagesRequest, machine: Hardware
) -> None:
    slow = with_part(machine, gpus=with_part(machine.gpus, tflops=machine.gpus.tflops / 100))
    boxes = (box("head", machine), box("slow", slow), box("attic", machine), box("cellar", machine))
    plan = plan_stages(replace(request_for_two, boxes=boxes, num_boxes=2), _SHAPES)
    assert [stage.box for stage in plan.stages] == ["head", "attic"]


def test_boxes_that_lack_least_are_named_if_none_fit(request_for_two: StagesRequest, machine: Hardware) -> None:
    boxes = (
        box("head", machine),
        box("attic", machine, device_memory_nbytes=1000),
        box("cellar", machine, device_memory_nbytes=2000),
    )
    with pytest.raises(StagesDoNotFitError, match=r"of any 2: head, cellar lack least.*box cellar lacks"):
        plan_stages(replace(request_for_two, boxes=boxes, num_boxes=2), _SHAPES)


def test_space_on_ssds_that_is_free_limits_a_box(request_for_two: StagesRequest, machine: Hardware) -> None:
    free = {"a": 10**13, "b": 10**13 + 1, "c": 2 * 10**13}
    boxes = [box(name, machine, ssd_nbytes=nbytes) for name, nbytes in free.items()]
    request = replace(request_for_two, boxes=tuple(boxes), rates=())
    assert [len(group) for group in job_stages._equal_boxes(request, 10**15)] == [2, 1]
    assert [len(group) for group in job_stages._equal_boxes(request, 10**12)] == [3], "all have more than enough"
    ssds = job_stages._with_room(boxes[1:]).ssds
    assert ssds.count * ssds.capacity_gib == pytest.approx((10**13 + 1) / 2**30)


@pytest.mark.long
def test_network_is_that_between_the_chosen_boxes(request_for_two: StagesRequest, machine: Hardware) -> None:
    boxes = tuple(box(name, machine) for name in ("head", "far", "near"))
    rates = (
        *both_ways("head", "far", 1e6),
        *both_ways("head", "near", 1.25e9),
        *both_ways("near", "far", 1e6),
    )
    three = replace(request_for_two, boxes=boxes, num_boxes=2, rates=rates)
    plan = plan_stages(three, _SHAPES)
    assert [stage.box for stage in plan.stages] == ["head", "near"]
    two = plan_stages(replace(three, boxes=(boxes[0], boxes[2]), rates=both_ways("head", "near", 1.25e9)), _SHAPES)
    assert plan.step_s == two.step_s, "the slow box does not count"


def test_box_with_few_gpus_has_no_more_workers_without_a_solver_either(request_for_two: StagesRequest) -> None:
    training = replace(request_for_two.training, batch_size=8, num_microbatches=8)
    boxes = (box("head", None, num_ranks=2), box("attic", None, num_ranks=1))
    plan = plan_stages(replace(request_for_two, training=training, num_ranks=4, boxes=boxes), _SHAPES)
    assert (plan.step_s, plan.num_ranks, plan.ranks) == (None, 2, (2, 1))
    assert StagesPlan.from_json(plan.to_json()) == plan
    assert ["num_ranks" in stage for stage in plan.to_json()["stages"]] == [False, True]


def test_network_card_has_the_rate_of_its_fastest_way(
    searched: tuple[StagesPlan, PlannedStages], request_for_two: StagesRequest, machine: Hardware
) -> None:
    """A slow pair is slow because of one of its cards: the other one is not slow towards others."""
    (first, second), planned = request_for_two.boxes, searched[1]
    third = replace(second, name="slow")
    rates = (*both_ways("head", "attic", 1e9), *both_ways("attic", "slow", 1e8))
    three = replace(
        planned,
        boxes=(*planned.boxes, planned.boxes[-1]),
        pipeline=replace(planned.pipeline, network_bytes=(1.0, 1.0, 1.0)),
    )
    request = replace(request_for_two, boxes=(first, second, third), rates=rates)
    groups = [[each] for each in request.boxes]
    kinds = {plans.kind.name for plans in three.boxes}
    groups = [list(request.boxes)] if len(kinds) == 1 else groups
    found = job_stages._over_their_network(three, request, groups)
    assert found.pipeline.network_bytes == (1e9, 1e9, 1e8)


def test_boxes_whose_network_is_nearly_as_fast_share_plans(request_for_two: StagesRequest, machine: Hardware) -> None:
    boxes = tuple(box(name, machine) for name in ("head", "a", "b", "slow"))
    rates = (*both_ways("head", "a", 1e9), *both_ways("head", "b", 0.9e9), *both_ways("head", "slow", 1e8))
    request = replace(request_for_two, boxes=boxes, rates=rates)
    assert [[each.name for each in group] for group in job_stages._equal_boxes(request, 10**15)] == [
        ["head", "a", "b"],
        ["slow"],
    ]
    assert (request.rate_of("head"), request.rate_of("slow"), request.rate_between("a", "b")) == (1e9, 1e8, None)


def test_each_box_uses_its_own_number_of_gpus(request_for_two: StagesRequest, machine: Hardware) -> None:
    two = with_part(machine, gpus=with_part(machine.gpus, count=2))
    request = replace(
        request_for_two,
        training=replace(request_for_two.training, batch_size=8, num_microbatches=8),
        boxes=(box("head", two), box("attic", machine, num_ranks=1)),
        num_ranks=2,
    )
    plan = plan_stages(request, _SHAPES)
    assert (plan.num_ranks, plan.ranks) == (2, (2, 1))
    assert [stage.num_ranks for stage in plan.stages] == [None, 1]
    assert plan.step_s is not None
    assert StagesPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_timeline_of_a_simulated_step_has_the_names_of_the_boxes(
    request_for_two: StagesRequest, tmp_path: Path
) -> None:
    plan_stages(request_for_two, _SHAPES, folder := tmp_path / "simulated")
    kept = load_step(folder, held_steps(folder)[-1])
    assert kept is not None
    assert names_of_boxes(kept.summary) == ["head", "attic"]
    computing = {span.resource for span in kept.spans if span.kind is SpanKind.FORWARD}
    assert computing == {"gpu-0/compute", "b1/gpu-0/compute"}


def test_network_without_a_rate_is_refused(request_for_two: StagesRequest) -> None:
    with pytest.raises(ValueError, match=r"from head to attic is 0\.0; it must be > 0"):
        replace(request_for_two, rates=both_ways("head", "attic", 0.0))


@pytest.mark.long
def test_boxes_that_were_measured_are_chosen_first(request_for_two: StagesRequest, machine: Hardware) -> None:
    boxes = (box("head", machine), box("attic", None), box("cellar", machine))
    plan = plan_stages(replace(request_for_two, boxes=boxes, num_boxes=2), _SHAPES)
    assert [stage.box for stage in plan.stages] == ["head", "cellar"]
    assert plan.step_s is not None
    boxes = (box("head", machine), box("attic", None), box("cellar", None))
    plan = plan_stages(replace(request_for_two, boxes=boxes, num_boxes=2), _SHAPES)
    assert ([stage.box for stage in plan.stages], plan.step_s) == (["head", "attic"], None)


def test_more_boxes_than_layers_are_refused_also_without_a_solver(
    request_for_two: StagesRequest, machine: Hardware
) -> None:
    for hardware in (machine, None):
        boxes = tuple(box(str(index), hardware) for index in range(4))
        with pytest.raises(StagesError, match="the model has 3 layers, and each of the job's 4 boxes needs one"):
            plan_stages(replace(request_for_two, boxes=boxes))


def test_model_with_tied_embeddings_is_divided_over_boxes_with_several_gpus(
    request_for_two: StagesRequest, tmp_path: Path
) -> None:
    layout = ModelLayout.from_json(request_for_two.layout_file.read_text())
    tied = replace(layout, shared=(*layout.shared[:-1], (layout.blocks[-1].index, layout.blocks[0].index)))
    (tmp_path / "layout.json").write_text(tied.to_json())
    boxes = (box("head", None), box("attic", None))
    request = replace(request_for_two, layout_file=tmp_path / "layout.json", boxes=boxes)
    plan = plan_stages(replace(request, num_ranks=2))
    assert (len(plan.stages), plan.num_ranks) == (2, 2)


def test_request_survives_json(request_for_two: StagesRequest) -> None:
    values = json.loads(json.dumps(request_for_two.to_json()))
    assert StagesRequest.from_json(values) == request_for_two
    for wrong in ({**values, "extra": 1}, {**values, "boxes": []}, {**values, "training": {}}):
        with pytest.raises(ValueError):
            StagesRequest.from_json(wrong)


@pytest.mark.parametrize("number", [0, 3])
def test_request_asks_for_one_box_or_more_of_those_that_it_has(request_for_two: StagesRequest, number: int) -> None:
    with pytest.raises(ValueError, match="it must be 1 to 2"):
        replace(request_for_two, num_boxes=number)


def test_request_has_each_box_once(request_for_two: StagesRequest) -> None:
    with pytest.raises(ValueError, match="one box at least, and each once, and not head, head"):
        replace(request_for_two, boxes=request_for_two.boxes[:1] * 2)


def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> dict[str, Any]:
    question, result = tmp_path / "question.json", tmp_path / "result.json"
    question.write_text(json.dumps(values))
    monkeypatch.setattr(sys, "argv", ["worker", "--question", str(question), "--result", str(result)])
    stages_process.main()
    told: dict[str, Any] = json.loads(result.read_text())
    return told


def test_process_writes_the_plan_or_why_there_is_none(
    request_for_two: StagesRequest, machine: Hardware, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmeasured = replace(request_for_two, boxes=(box("head", None), box("attic", None)))
    told = answer(tmp_path, monkeypatch, unmeasured.to_json())
    assert told["ok"]
    assert StagesPlan.from_json(told["stages"]) == plan_stages(unmeasured)

    def code_of(request: StagesRequest) -> str:
        told = answer(tmp_path, monkeypatch, request.to_json())
        assert not told["ok"]
        assert told["error"]["message"]
        return str(told["error"]["code"])

    assert code_of(replace(unmeasured, boxes=tuple(box(str(index), None) for index in range(4)))) == "not_divisible"
    with pytest.raises(FileNotFoundError):  # a file of the service: no fault of the model
        code_of(replace(unmeasured, layout_file=tmp_path / "none.json"))

    def refuse(*_: object, **__: object) -> Any:
        raise StagesDoNotFitError("box attic lacks 1 GiB")

    monkeypatch.setattr(stages_process, "plan_stages", refuse)
    assert code_of(unmeasured) == "does_not_fit"
