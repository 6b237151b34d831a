"""Plans of one box for a run of the model's blocks, and the times of its stage."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from windlass.actors.worker_policy import num_groups_ahead
from windlass.amounts import GB
from windlass.engine.memory_plan import Crossings, UpdateOrder
from windlass.planner.question import PlanQuestion, Profiles, solve_counted
from windlass.planner.solver import (
    DoesNotFitError,
    Part,
    PlannedJob,
    Solution,
    least_copied_s,
    least_cost_of,
    most_cost_of_any,
    updates_of,
)
from windlass.planner.stages.pipeline import LeastWork, StageTimes

# The parts of a step that each box has once a step, not in every round.
# With kept gradients, what passes the host's memory in the forward pass has the updates.
_ONCE_A_STEP = (Part.OPTIMIZER, Part.SSD_UPDATE, Part.SSD_FLUSH, Part.FIRST_UPDATE, Part.HOST_FORWARD)


@dataclass(frozen=True, kw_only=True)
class BoxKind:
    """Equal boxes, and the question of the job on one of them."""

    name: str
    number: int
    question: PlanQuestion

    @property
    def network_bytes(self) -> float | None:
        """The rate of a box's network card in bytes per second, each way; None: it is not known."""
        rate = self.question.hardware.network_gb_per_s
        return None if rate is None else rate * GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The division of a step into rounds, which all boxes have in common."""

    num_ranks: int  # GPUs of each box; a box with fewer uses all that it has
    num_microbatches: int
    group_size: int  # micro-batches that a GPU computes together

    @property
    def number(self) -> int:
        """The number of groups that the first GPU of a box with most GPUs computes in a step."""
        return -(-self.num_microbatches // (self.group_size * self.num_ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run of a model's blocks, those from `first` on, before `stop`: stage `stage` of as many as `ranks` has."""

    first: int
    stop: int
    stage: int
    ranks: tuple[int, ...]  # GPUs of each box

    @property
    def num_stages(self) -> int:
        """The number of boxes."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxPlan:
    """The plan of a box for its blocks, with the times of its stage."""

    solution: Solution
    times: StageTimes


def agree(plans: Sequence[BoxPlan]) -> bool:
    """Returns whether one job can have these plans, one for each box.

    All boxes have the same order of updates, and the same cut of matrices. Gradients on an SSD of one box require a
    commit of every step, and so no states in the memory of any box.
    """
    jobs = [plan.solution.costs.job for plan in plans]
    choices = {(job.update_order, job.cut) for job in jobs}
    engine_plans = [plan.solution.plan for plan in plans]
    spills = any(plan.spilled_blocks for plan in engine_plans)
    rests = any(plan.host_blocks or plan.device_blocks for plan in engine_plans)
    return len(choices) == 1 and not (spills and rests)


@dataclass(slots=True)
class _Tried:
    plan: BoxPlan | None
    below: float  # plans whose step is as long were not searched


@dataclass(kw_only=True)
class BoxPlans:
    """The plans of one kind of box, each searched once: equal runs of layers in equal places have equal plans."""

    kind: BoxKind
    profiles: Profiles
    spills: bool | None = None  # kept gradients go to the SSDs; None: the best plan decides
    _tried: dict[object, _Tried] = field(default_factory=dict)
    _jobs: dict[tuple[int, int], PlannedJob] = field(default_factory=dict)
    _least: dict[Rounds, LeastWork] = field(default_factory=dict)
    _alike: "list[BoxPlans]" = field(init=False, default_factory=list)
    _by_cut: "dict[int | None, BoxPlans]" = field(init=False, default_factory=dict)

    def of(self, run: Run, rounds: Rounds, *, below: float = math.inf) -> BoxPlan | None:
        """Returns the plan of a box for a run of blocks. None: none fits, or each takes `below` seconds or more."""
        layers = self.job(rounds).model.layers
        last = len(layers) + 1
        # Equal layers of a profile are one object, and comparing their contents is slow.
        numbers = Counter(map(id, layers[max(run.first, 1) - 1 : min(run.stop, last) - 1]))
        ends = run.first == 0, run.stop == last + 1
        key = frozenset(numbers.items()), ends, self._num_groups_in_flight(run, rounds), rounds
        tried = self._tried.get(key)
        if tried is None or (tried.plan is None and tried.below < below):
            tried = self._tried[key] = _Tried(self._searched(run, rounds, below), below)
        return tried.plan

    def of_blocks(self, run: Run, rounds: Rounds) -> BoxPlan | None:
        """Returns the plan of a box for a run of blocks, with their numbers. None: none fits.

        That of `of` may be for an equal run elsewhere in the model, and name the blocks of that one.
        """
        plan = self.of(run, rounds)
        if plan is None or plan.solution.costs.job.model.own in (None, frozenset(range(run.first, run.stop))):
            return plan
        return self._searched(run, rounds, math.inf)

    def _searched(self, run: Run, rounds: Rounds, below: float) -> BoxPlan | None:
        job = self.job_of(run, rounds)
        smallest_cut = job.cuts[-1] if job.cuts else job.cut
        try:
            solution = solve_counted(
                self.question_of(rounds), job, self.profiles, below=most_cost_of_any(smallest_cut, below)
            )
        except DoesNotFitError:
            return None
        return BoxPlan(solution=solution, times=times_of(solution, rounds))

    def num_ranks(self, rounds: Rounds) -> int:
        """Returns the number of GPUs that such a box uses."""
        return min(rounds.num_ranks, self.kind.question.num_ranks)

    def question_of(self, rounds: Rounds) -> PlanQuestion:
        """Returns the question with the number of GPUs."""
        return replace(self.kind.question, num_ranks=self.num_ranks(rounds), chooses_ranks=False)

    def job(self, rounds: Rounds) -> PlannedJob:
        """Returns the job with all blocks on one box."""
        key = self.num_ranks(rounds), rounds.num_microbatches
        if key not in self._jobs:
            job = self.profiles.job(self.question_of(rounds), rounds.num_microbatches)
            self._jobs[key] = replace(job, spills=self.spills)
        return replace(self._jobs[key], group_size=rounds.group_size)

    @property
    def alike(self) -> "Sequence[BoxPlans]":
        """The plans with each choice that all boxes of a job must make alike: see `agree`."""
        if not self._alike:
            question = self.kind.question
            orders = [question.training.order_of_updates]
            if question.chooses_order:
                orders = list(dict.fromkeys((*orders, UpdateOrder.KEPT)))
            for order in orders:
                of_order = replace(question.changed(update_order=order), chooses_order=False)
                kind = replace(self.kind, question=of_order)
                self._alike += [
                    BoxPlans(kind=kind, profiles=self.profiles, spills=spills)
                    for spills in ((False, True) if order.keeps_grads else (None,))
                ]
        return self._alike

    def is_alike(self, plan: BoxPlan) -> bool:
        """Returns whether a plan makes the choices of these plans, one of `alike`."""
        costs, order = plan.solution.costs, self.kind.question.training.order_of_updates
        return costs.job.update_order is order and self.spills in (None, costs.spills)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The elements of a part of a matrix of which the planner may choose one; see `PlannedJob.cuts`."""
        question = self.kind.question
        return self.profiles.job(question, question.training.num_microbatches).cuts

    def with_cut(self, cut: int | None) -> "BoxPlans":
        """Returns the plans with one cut of matrices; None: all matrices are whole."""
        if not self.kind.question.chooses_cut:
            return self
        if cut not in self._by_cut:
            kind = replace(self.kind, question=self.kind.question.changed(cut_matrices=cut))
            self._by_cut[cut] = BoxPlans(kind=kind, profiles=self.profiles, spills=self.spills)
        return self._by_cut[cut]

    def least_work(self, rounds: Rounds) -> LeastWork:
        """Returns the least work of a box for a step of the whole model."""
        if rounds not in self._least:
            question, job = self.question_of(rounds), self.job(rounds)
            copied_s, resident_share = least_copied_s(job, question.speeds, question.limits)
            self._least[rounds] = LeastWork(
                step_s=least_cost_of(job, question.speeds, question.limits),
                passes_s=least_cost_of(job, question.speeds, question.limits, without=_ONCE_A_STEP),
                copied_s=copied_s,
                resident_share=resident_share,
            )
        return self._least[rounds]

    def job_of(self, run: Run, rounds: Rounds) -> PlannedJob:
        """Returns the job with a run of blocks on a box."""
        job = self.job(rounds)
        if run.num_stages == 1:
            return job
        training = job.training
        num_tokens = job.model.num_examples * training.sequence_length  # the size that the engine allocates
        layout = self.profiles.layout.of_blocks(run.first, run.stop)
        return replace(
            job,
            model=job.model.of_blocks(run.first, run.stop),
            crossings=Crossings(
                num_neighbours=(run.stage > 0) + (run.stage + 1 < run.num_stages),
                microbatch_nbytes=num_tokens * layout.hidden_size * training.formats.precision.itemsize,
                num_lent_chunks=sum(len(layout.chunk_ranges(block)) for block in layout.lent),
                num_borrowed_chunks=sum(len(layout.chunk_ranges(block)) for block in layout.borrowed),
            ),
            num_groups_in_flight=self._num_groups_in_flight(run, rounds),
        )

    @staticmethod
    def _num_groups_in_flight(run: Run, rounds: Rounds) -> int:
        """Returns the number of a GPU's groups whose activations are on the device at once."""
        num_groups = -(-rounds.num_microbatches // rounds.group_size)
        return num_groups_ahead(run.stage, run.ranks, num_groups)


def times_of(solution: Solution, rounds: Rounds) -> StageTimes:
    """Returns the times of a stage, by the bounds of its box's step.

    The bounds without what is done once a step are the time of all passes. It is divided evenly over the job's rounds,
    which are those of the boxes with most GPUs.
    """
    costs, seconds = solution.costs, solution.seconds
    bounds = costs.program_without_buffers(costs.kinds()).bounds
    parts = [part for part in Part if part not in _ONCE_A_STEP]
    passes_s = max(sum(bound.weights[part] * seconds[part] for part in parts) for bound in bounds)
    order = costs.job.update_order
    updates_s = max(
        sum(weight * seconds[part] for part, weight in weights.items())
        for weights in updates_of(order, costs.slots_of_updates())
    )
    # Updates end before the first round's head, whose forward and backward pass are one operation.
    num_rounds = rounds.number
    head_s = costs.num_successive * sum(costs.compute_s(costs.job.model.head))
    beside_s = seconds[Part.FORWARD] - head_s
    if not order.keeps_grads:
        beside_s += seconds[Part.BACKWARD]
    return StageTimes(
        round_s=passes_s / num_rounds,
        computed_s=(seconds[Part.FORWARD] + seconds[Part.BACKWARD]) / num_rounds,
        beside_updates_s=beside_s / num_rounds if order.overlaps_steps else 0.0,
        updates_s=updates_s,
        first_update_s=seconds[Part.FIRST_UPDATE],
        alone_s=solution.step_s,
    )
