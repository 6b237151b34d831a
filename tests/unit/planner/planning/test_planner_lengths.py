"""Plans by the lengths of a job's examples: memory for the longest, time for the actual ones."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.planner.questions import MACHINE, question
from tests.support.training import has_direct_io, make_partition, make_spec
from tests.unit.actors.job.test_device_memory_check import Found
from windlass.actors.job.context import make_context
from windlass.actors.job.device_memory_check import device_need_of_job
from windlass.actors.job.spec import JobSpec
from windlass.actors.runtime.local_runner import run_local
from windlass.amounts import GIB
from windlass.engine.data.dataset import PreparedDataset
from windlass.engine.memory_estimate.device_peak import device_need
from windlass.engine.memory_estimate.traced_facts import TracedFacts
from windlass.engine.memory_plan.device_moments import Pass
from windlass.engine.memory_plan.example_lengths import ExampleLengths
from windlass.engine.memory_plan.memory_tier import MemoryTier
from windlass.engine.model.partition import Partition, build_meta_model, load_config
from windlass.planner.feasibility.feasibility import with_part
from windlass.planner.feasibility.remedies import _smaller
from windlass.planner.hardware.hardware import Gpus, Hardware, Host, Pcie, Ssds
from windlass.planner.hardware.model_shape import ModelShape
from windlass.planner.planning.job_planning import plan_job, question_of
from windlass.planner.planning.planner import planned
from windlass.planner.planning.simulated_search import best_plan
from windlass.planner.profiling.model_profiler import config_of_shape
from windlass.planner.question.exact_search import search_exactly
from windlass.planner.question.plan_request import PlanRequest
from windlass.planner.question.profiles import Profiles
from windlass.planner.question.question import PlanQuestion
from windlass.planner.question.report import ExampleTokens, PlanReport
from windlass.planner.question.times_of_blocks import TimesNeed
from windlass.storage.ids import Formats, Precision, StatePrecision

SMALL = ModelShape(num_layers=2, hidden_size=256, num_heads=4, vocab_size=1000, num_kv_heads=4)
SHORT = ExampleLengths(longest=16, mean=16.0, mean_square=256.0)
# A GPU so slow that compute is the bottleneck.
SLOW = with_part(MACHINE, gpus=with_part(MACHINE.gpus, tflops=0.2))


def short(*, lengths: ExampleLengths | None = None, **changes: Any) -> PlanQuestion:
    """The default length, and a model that allows it."""
    config = config_of_shape(SMALL, num_tokens=2048)
    fields = {"sequence_length": 2048, "num_microbatches": 2, "hardware": SLOW}
    if lengths is not None:
        fields["lengths"] = lambda _batch_size, _number: lengths
    return question(config=config, **{**fields, **changes})


def solved(asked: PlanQuestion) -> tuple[float, int]:
    """The minimum seconds of a step, and the job's bytes on the device."""
    solution = search_exactly(asked, (2,), Profiles(asked)).best
    return solution.step_s, solution.nbytes[MemoryTier.DEVICE]


def reported(asked: PlanQuestion, profiles: Profiles) -> PlanReport:
    """The report of the best plan by the cost model, without simulation."""
    job, solution = best_plan(asked, profiles)
    return planned(asked, job, solution, profiles).report


@pytest.mark.long
def test_a_plan_for_short_examples_is_that_of_their_length() -> None:
    asked = short(lengths=SHORT)
    report = reported(asked, Profiles(asked))
    of_data, of_16, of_limit = map(solved, (short(lengths=SHORT), short(sequence_length=16), short()))
    assert of_data == of_16
    assert report.bound_s == of_data[0]
    assert of_limit[0] > 50 * of_data[0]
    assert of_limit[1] > 2 * of_data[1]
    assert report.tokens_per_s == pytest.approx(8 * 16 / of_data[0])
    assert report.example_tokens == ExampleTokens(limit=2048, widest=16, mean=16.0, of_data=True)


@pytest.mark.long
def test_a_plan_without_data_says_that_examples_are_taken_to_be_as_long_as_they_may_be() -> None:
    asked = short(sequence_length=64)
    report = reported(asked, Profiles(asked))
    assert report.example_tokens == ExampleTokens(limit=64, widest=64, mean=64, of_data=False)


@pytest.mark.long
def test_one_long_example_decides_the_memory_and_not_the_time() -> None:
    rare = short(lengths=ExampleLengths(longest=2048, mean=20.0, mean_square=4500.0))
    of_short, of_rare, of_limit = map(solved, (short(lengths=SHORT), rare, short()))
    assert of_short[0] < of_rare[0] < 2 * of_short[0] < of_limit[0]
    # The best activation choices differ, so memory is compared under one plan.
    profiles = Profiles(rare)
    solution = search_exactly(rare, (2,), profiles).best
    needs = [profiles.device_need(each, profiles.job(each, 2), solution) for each in (rare, short())]
    assert needs[0] == needs[1]


def test_blocks_are_measured_at_a_width_near_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, int]] = []

    def note(_: object, need: TimesNeed) -> None:
        assert need.num_microbatches == 2
        shapes.append((need.profile.num_examples, need.profile.num_tokens))

    monkeypatch.setattr(Profiles, "_times_for", note)
    asked = short(lengths=ExampleLengths(longest=512, mean=101.0, mean_square=20_000.0))
    profiles = Profiles(asked)
    job = profiles.job(asked, 2)
    assert profiles.job(asked, 2).model is job.model
    assert shapes == [(4, 104)], "once, and not at the widest"
    assert (job.model.num_tokens, job.model.mean_tokens) == (512, 101.0)


@pytest.mark.long
def test_validation_examples_that_are_longer_count() -> None:
    asked = short(lengths=SHORT)
    longer = short(lengths=replace(SHORT, longest_validation=2048, num_validation_examples=3))
    profiles = Profiles(asked)
    job, solution = profiles.job(asked, 2), search_exactly(asked, (2,), profiles).best
    needs = [profiles.device_need(each, job, solution) for each in (asked, longer)]
    assert [need.moment.direction is Pass.EVALUATE for need in needs] == [False, True]
    assert solved(longer)[1] >= needs[1].nbytes > needs[0].nbytes


@pytest.mark.long
def test_advice_on_length_uses_lengths_of_real_examples() -> None:
    data = ExampleLengths(longest=128, mean=100.0, mean_square=11_000.0)
    asked = short(lengths=data, batch_size=1, num_microbatches=1)
    nbytes = search_exactly(asked, (1,), Profiles(asked)).best.nbytes[MemoryTier.DEVICE]
    # A limit of three quarters of 2048 tokens would change nothing: the longest example has 128.
    words = _smaller(replace(asked, device_memory_nbytes=nbytes // 2), Profiles(asked))
    assert words is None or int(words.split()[-2]) < 128


def test_chosen_number_of_microbatches_decides_how_wide_they_are(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, batch_size=4)
    redraw_lengths(spec, seed=0)
    config = load_config(spec.model_dir)
    asked = question_of(request_of(spec, chooses_microbatches=True), config)
    means = []
    for number in (1, 2, 4):
        training = replace(spec.training, num_microbatches=number)
        fixed = question_of(request_of(replace(spec, training=training)), config)
        lengths = asked.lengths_in(number)
        assert lengths is not None
        assert lengths == fixed.lengths_in(number)
        assert asked.widest == fixed.widest == lengths.longest
        means.append(lengths.mean)
    assert means == sorted(means, reverse=True), "the more micro-batches, the less padding"
    assert means[0] > means[-1]


def test_question_that_leaves_microbatches_open_does_not_depend_on_the_number_in_the_request(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, batch_size=4)
    config = load_config(spec.model_dir)
    trainings = [replace(spec.training, num_microbatches=number) for number in (1, 4)]
    first, second = (
        question_of(request_of(replace(spec, training=training), chooses_microbatches=True), config)
        for training in trainings
    )
    assert first.training == second.training
    assert first.training.num_microbatches == first.least_microbatches == 1


# --- by the plan, with real data ----------------------------------------------------------------------------------


def request_of(spec: JobSpec, **changes: Any) -> PlanRequest:
    """The service's request for a plan of this job, on a machine without a GPU."""
    training = replace(spec.training, sequence_length=changes.pop("sequence_length", 2048))
    fields: dict[str, Any] = {
        "model_dir": Path(spec.model_dir),
        "hardware": Hardware(
            gpus=Gpus(count=0, memory_gib=4, tflops=0.05),
            host=Host(memory_gib=4, memory_gb_per_s=10, adam_params_per_s=3e8),
            pcie=Pcie(h2d_gb_per_s=5, d2h_gb_per_s=5),
            ssds=Ssds(count=2, read_gb_per_s=1, write_gb_per_s=1, capacity_gib=10),
        ),
        "training": training,
        "dataset_dir": Path(spec.dataset_dir),
        "num_optimizers": 1,
        "host_memory_nbytes": None,
        "device_memory_nbytes": None,
    }
    return PlanRequest(**fields | changes)


def redraw_lengths(spec: JobSpec, seed: int) -> None:
    """Writes other examples: most are short, some are long. The longest may be in either split."""
    random = np.random.default_rng(seed)
    for split in ("train", "validation"):
        path = Path(spec.dataset_dir) / f"{split}.offsets"
        num = len(np.fromfile(path, np.int64)) - 1
        total = Path(spec.dataset_dir, f"{split}.tokens").stat().st_size // 4
        weights = random.pareto(1.0, num) + 0.01
        lengths = np.maximum(1, np.minimum(48, weights / weights.sum() * (total - 48 * 2))).astype(np.int64)
        lengths[-1] = max(1, min(48, total - lengths[:-1].sum()))
        offsets = np.cumsum([0, *lengths])
        # The remaining tokens belong to no example, and the sizes of the files give the number of examples.
        offsets.astype(np.int64).tofile(path)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))])
@pytest.mark.parametrize(
    ("num_microbatches", "precision", "tied"),
    [(2, Precision.BF16, True), pytest.param(1, Precision.FP32, False, marks=pytest.mark.long)],
)
def test_planned_memory_suffices_for_every_batch_and_evaluation(
    tmp_path: Path, seed: int, num_microbatches: int, precision: Precision, tied: bool
) -> None:
    spec = make_spec(tmp_path, num_microbatches=num_microbatches, precision=precision, tied=tied, total_steps=2)
    redraw_lengths(spec, seed)
    found = plan_job(request_of(spec, sequence_length=48), tmp_path)
    assert found.report.engine_gib is not None
    assert found.placement is not None
    planned_nbytes = round(found.report.engine_gib["gpu"] * GIB)
    spec = replace(spec, placement=found.placement, host_memory_nbytes=found.arena_nbytes)
    partition = make_partition(spec)
    context = make_context(spec, partition.layout, "")
    # The engine uses the planner's chunks, not those of other tests. Buffers on the device hold whole blocks.
    assert device_need_of_job(context, partition).nbytes <= planned_nbytes
    hyper, train = spec.training, PreparedDataset.open(spec.dataset_dir, "train")
    steps = (train.batch(step, hyper.batch_size, num_microbatches, hyper.seed) for step in range(hyper.total_steps))
    shapes = {tuple(tuple(microbatch.input_ids.shape) for microbatch in step) for step in steps}
    validation = PreparedDataset.open(spec.dataset_dir, "validation")
    evaluated = {
        tuple(each.input_ids.shape) for each in validation.evaluation_batches(hyper.batch_size // num_microbatches)
    }
    facts = TracedFacts(partition)
    for step in shapes:
        need = device_need(
            facts,
            context.plan,
            list(step)[: context.plan.group_size],
            formats=Formats(precision, StatePrecision.FP32),
            grad_precision=Precision.FP32 if num_microbatches > 1 else precision,
            num_microbatches=num_microbatches,
            num_ahead=2,
            max_tokens=hyper.batch_size * 48,
            head_slices=hyper.head_slices,
            evaluation_shapes=sorted(evaluated)[:1],
        )
        assert need.nbytes <= planned_nbytes, step


@pytest.mark.long
def test_a_job_of_mixed_lengths_runs_within_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec(tmp_path, total_steps=5, evaluate_every=5, num_microbatches=2)
    redraw_lengths(spec, seed=1)
    found = plan_job(request_of(spec), tmp_path)
    report = found.report
    assert report.example_tokens is not None
    assert report.engine_gib is not None
    assert report.example_tokens.widest <= 48
    assert found.placement is not None
    spec = replace(spec, placement=found.placement, host_memory_nbytes=found.arena_nbytes)
    seen = Found(monkeypatch)
    outcome = run_local(spec, partition=planner_partition(spec), direct=has_direct_io(tmp_path))
    assert outcome["status"] == "succeeded", outcome
    taken = sum(seen.buffers.values()) + seen.states_nbytes + seen.activations_nbytes
    assert taken <= report.engine_gib["gpu"] * GIB


def planner_partition(spec: JobSpec) -> Partition:
    """The partition with the planner's chunks."""
    partition = Partition(build_meta_model(load_config(spec.model_dir), spec.training.precision))
    Path(spec.layout_file).write_text(partition.layout.to_json())
    return partition
