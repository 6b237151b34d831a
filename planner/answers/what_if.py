"""Plans a job again with one thing changed: what one more SSD, more RAM, a GPU, a box or another setting would give.

Each answer is a plan by the same search as the job's own, so it is what `windlass plan` says of such a machine.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from windlass.amounts import GIB
from windlass.engine.memory_estimate import DeviceNeedUnknownError
from windlass.engine.memory_plan import UpdateOrder
from windlass.planner.feasibility import with_part
from windlass.planner.hardware import (
    Hardware,
    limit_in_words,
    with_faster_card,
    with_more_ram,
    with_more_ssds,
    with_one_more_gpu,
)
from windlass.planner.planning import (
    NOBODY,
    AbandonedError,
    Planned,
    TimesLackError,
    Watcher,
    lacking_times,
    measure_all,
    plan_without_advice,
    questions_by_number,
    with_measuring_s,
)
from windlass.planner.question import PlanQuestion, PlanReport, Profiles, TimesNeed, WhatIf, different_needs
from windlass.planner.solver import DoesNotFitError
from windlass.planner.stages import BoxKind, BoxPlans, StagesError, best_plans
from windlass.storage.ids import Precision, StatePrecision
from windlass.storage.memory import is_out_of_memory

_Any = TypeVar("_Any")

_MORE_RAM_GIB = 64
# The rate of a network between two boxes where the machine's profile tells none: 10 Gbit/s, which a card and a cable
# for two boxes cost little for.
_NETWORK_GB_PER_S = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A changed job or machine. `speedup`: of the device, by which measured block times are divided."""

    key: str
    words: str
    question: PlanQuestion
    speedup: float = 1.0


def with_what_if(
    question: PlanQuestion,
    planned: Planned,
    watcher: Watcher = NOBODY,
    tell: Callable[[Planned, int], None] = lambda _so_far, _num_left: None,
) -> Planned:
    """Returns the answer to a question with the answers for each change, the largest gain first.

    Times of blocks that lack are measured first. If the question leaves them unmeasured, the job and all changes are
    compared by the machine's rates, because measured times and rates cannot be compared.

    `watcher`: is told of measurements, and its `check` is called before each change. A change that cannot be planned
    has a row that says so. `tell`: is called before each change, with the answers so far and the number that is left.

    Raises:
        TimesLackError: times lack that another process is to measure.
    """
    profiles = Profiles(question)
    now = planned.report.tokens_per_s if planned.report.feasible else None
    if question.measures and (needs := lacking_times_of_changes(question, profiles)):
        if question.leaves_unmeasured:
            report = with_measuring_s(planned.report, [*planned.lacking, *needs])
            profiles = profiles.by_rates()
            if not planned.lacking:  # then the job's own plan is by measured times
                watcher.check()
                now = _row_of(Change(key="", words="", question=question), profiles, None).tokens_per_s
            planned = replace(planned, report=report)
        elif question.measures_apart:
            raise TimesLackError
        else:
            measure = partial(measure_all, needs, profiles, see=watcher.see_measurement, check=watcher.check)
            _or_else(measure, lambda _error: None)  # the rows will say what is wrong
    rows = list[WhatIf]()
    changes = list(changes_of(question))
    for number, change in enumerate(changes):
        watcher.check()
        tell(_with_rows(planned, rows), len(changes) + 1 - number)
        rows.append(_row_of(change, profiles, now))
    watcher.check()
    tell(_with_rows(planned, rows), 1)
    if question.num_layers is None:
        hardware = _with_network(question.hardware)
        words = f"a second such box, over {8 * (hardware.network_gb_per_s or 0):.3g} Gbit/s"
        answer = partial(_with_second_box, replace(question, hardware=hardware), words, profiles, now)
        with contextlib.suppress(StagesError):  # the model cannot be divided
            rows.append(_row_or_problem("box", words, answer))
    return _with_rows(planned, rows)


def _with_rows(planned: Planned, rows: Iterable[WhatIf]) -> Planned:
    """Returns the answer with those for changes, the largest gain first."""
    in_order = sorted(rows, key=lambda row: (row.tokens_per_s is None, -(row.tokens_per_s or 0.0)))
    return replace(planned, report=replace(planned.report, what_if=tuple(in_order)))


def lacking_times_of_changes(question: PlanQuestion, profiles: Profiles) -> list[TimesNeed]:
    """Returns what is to be measured for the changes on one box."""
    lacking = list[TimesNeed]()
    for change in changes_of(question):
        times = partial(lacking_times, questions_by_number(change.question), profiles)
        lacking += _or_else(times, lambda _error: [])  # the row of the change will say why it cannot be planned
    return different_needs(lacking)


def _row_of(change: Change, profiles: Profiles, now: float | None) -> WhatIf:
    return _row_or_problem(change.key, change.words, partial(_answer, change, profiles, now))


def _row_or_problem(key: str, words: str, answer: Callable[[], WhatIf]) -> WhatIf:
    """Returns the answer for a change, or a row that says why it could not be planned."""
    return _or_else(answer, lambda error: replace(_row(key, words, None, None, None), problem=_problem_in_words(error)))


def _or_else(work: Callable[[], _Any], otherwise: Callable[[Exception], _Any]) -> _Any:
    """Returns what the work returns, or the value for its error.

    The job's own plan is there already, and is not lost because of a change. Two errors are raised: one says that the
    answer is not needed any more, and one that the model cannot be divided.
    """
    try:
        return work()
    except (AbandonedError, StagesError):
        raise
    except Exception as error:  # noqa: BLE001 - whatever went wrong, the rest is still of use
        traceback.print_exc()
        return otherwise(error)


def _problem_in_words(error: Exception) -> str:
    if is_out_of_memory(error):
        return "not planned: the planner got no more memory for it; ask again when less runs on the machine"
    if isinstance(error, DeviceNeedUnknownError):
        return f"not planned: {error}"
    return f"not planned, because of a defect of the planner ({type(error).__name__}: {error}); please report it"


def _answer(change: Change, profiles: Profiles, now: float | None) -> WhatIf:
    profiles = profiles.of_question(change.question, speedup=change.speedup)
    try:
        report = plan_without_advice(change.question, profiles).report
    except DoesNotFitError:
        report = PlanReport(feasible=False, reasons=())
    return _row(change.key, change.words, report.step_s, report.tokens_per_s, now)


def _row(key: str, words: str, step_s: float | None, rate: float | None, now: float | None) -> WhatIf:
    return WhatIf(
        key=key,
        change=words,
        feasible=rate is not None,
        step_s=step_s,
        tokens_per_s=rate,
        gain=None if rate is None or now is None else rate / now - 1,
    )


def _with_network(hardware: Hardware) -> Hardware:
    """Returns the machine with a network, whose rate is the usual one if it is not known."""
    return hardware.model_copy(update={"network_gb_per_s": hardware.network_gb_per_s or _NETWORK_GB_PER_S})


def _with_second_box(question: PlanQuestion, words: str, profiles: Profiles, now: float | None) -> WhatIf:
    """Answers for the job over two such boxes, of which the question is. Raises StagesError if it cannot be divided."""
    boxes = BoxPlans(kind=BoxKind(name="such", number=2, question=question), profiles=profiles.of_question(question))
    plans = best_plans([boxes], numbers=[2], simulates=True)
    best = plans[0] if plans else None
    return _row("box", words, None if best is None else best.step_s, None if best is None else best.tokens_per_s, now)


def changes_of(question: PlanQuestion) -> Iterator[Change]:
    """Yields the changes that apply to a job, each with the question that it makes."""
    hardware, training = question.hardware, question.training
    with_ssd = with_more_ssds(hardware, 1)
    words = f"one more SSD, {with_ssd.ssds.count} in all{limit_in_words(hardware.ssds, with_ssd.ssds)}"
    yield Change(key="ssds", words=words, question=replace(question, hardware=with_ssd))
    with_ram = _with_more_ram(question)
    yield Change(key="ram", words=_more_ram_in_words(hardware, with_ram.hardware), question=with_ram)
    if question.has_gpu:
        gpus = with_faster_card(hardware.gpus)
        yield Change(
            key="card",
            words="a GPU twice as fast" if gpus.name is None else f"the next card, {gpus.name}",
            question=_with_card_memory(
                replace(question, hardware=with_part(hardware, gpus=gpus)), gpus.memory_gib - hardware.gpus.memory_gib
            ),
            speedup=gpus.tflops / hardware.gpus.tflops,
        )
        if (with_gpu := _with_one_more_gpu(question)) is not None:
            more = with_gpu.num_ranks - question.num_ranks
            words = "one more GPU" if more == 1 else f"{'two' if more == 2 else more} more GPUs"
            words += f", {with_gpu.num_ranks} in all{_link_in_words(hardware, with_gpu.hardware)}"
            yield Change(key="gpus", words=words, question=with_gpu)
    batch_size = 2 * training.batch_size
    number = {} if question.chooses_microbatches else {"num_microbatches": 2 * training.num_microbatches}
    yield Change(
        key="batch",
        words=f"a batch twice as large, {batch_size}",
        question=question.changed(batch_size=batch_size, **number),
    )
    yield from _settings_of(question)


def _settings_of(question: PlanQuestion) -> Iterator[Change]:
    """Yields the other settings with which a step may take less time or memory. The words say what each gives up."""
    training, is_bf16 = question.training, question.training.precision is Precision.BF16
    if training.clip_norm is not None and training.precision is not Precision.FP16:
        words = "without gradient clipping (clip_norm: null, gradient_updates: auto): large gradients are not limited"
        yield Change(key="clip", words=words, question=_without_clipping(question))
    if is_bf16 and training.state_precision is StatePrecision.FP32:
        words = f"states in less space (state_precision: {StatePrecision.SPLIT}), with the same results"
        split = question.changed(state_precision=StatePrecision.SPLIT)
        yield Change(key="split_states", words=words, question=split)
    if is_bf16 and training.state_precision is not StatePrecision.BF16:
        words = f"states in {StatePrecision.BF16} (state_precision), which is less exact"
        in_bf16 = question.changed(state_precision=StatePrecision.BF16)
        yield Change(key="bf16_states", words=words, question=in_bf16)


def _without_clipping(question: PlanQuestion) -> PlanQuestion:
    """Returns the question for a job that does not clip, so that updates need not wait for all gradients."""
    if question.training.order_of_updates is not UpdateOrder.KEPT:
        return question.changed(clip_norm=None)
    # The only order with clipping that a request gets by itself.
    return replace(question.changed(clip_norm=None, update_order=UpdateOrder.ACTIVE), chooses_order=True)


def _with_more_ram(question: PlanQuestion) -> PlanQuestion:
    """Returns the question with more host memory, of which the job's budget gets all."""
    more, budget = with_more_ram(question.hardware, _MORE_RAM_GIB), question.host_memory_nbytes
    return replace(question, hardware=more, host_memory_nbytes=None if budget is None else budget + _MORE_RAM_GIB * GIB)


def _more_ram_in_words(hardware: Hardware, more: Hardware) -> str:
    """Names the change, and the rate of the memory where a board runs more of it slower."""
    rate, now = more.host.memory_gb_per_s, hardware.host.memory_gb_per_s
    slower = "" if rate == now else f" (all of it at {rate:g} GB/s, now {now:g})"
    return f"{_MORE_RAM_GIB} GiB more RAM{slower}"


def _link_in_words(hardware: Hardware, more: Hardware) -> str:
    """Names the rate of each GPU's link where a board divides its lanes among more GPUs."""
    rate, now = more.pcie.h2d_gb_per_s, hardware.pcie.h2d_gb_per_s
    return "" if rate == now else f" (the link of each at {rate:g} GB/s, now {now:g})"


def _with_card_memory(question: PlanQuestion, more_gib: float) -> PlanQuestion:
    """Returns the question with a larger budget of the card's memory, if there is one."""
    budget = question.device_memory_nbytes
    return question if budget is None else replace(question, device_memory_nbytes=budget + int(more_gib * GIB))


def _with_one_more_gpu(question: PlanQuestion) -> PlanQuestion | None:
    """Returns the question for one more GPU; None if there would be no place or no micro-batch for it."""
    training, num_ranks = question.training, question.num_ranks + 1
    hardware = question.hardware
    if hardware.gpus.count < num_ranks:
        larger = with_one_more_gpu(hardware)
        if larger is None:
            return None
        hardware = larger
        num_ranks = hardware.gpus.count  # some desktops have two or four, but not three
    more = replace(question, hardware=hardware, num_ranks=num_ranks)
    number = more.least_microbatches if question.chooses_microbatches else training.num_microbatches
    if not num_ranks <= number <= training.batch_size:
        return None
    return replace(more, training=replace(training, num_microbatches=number))
