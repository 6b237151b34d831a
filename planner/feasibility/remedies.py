"""Finds the changes with which a job fits, the cheapest first."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from windlass.engine.memory_plan import UpdateOrder
from windlass.planner.feasibility.feasibility import fits, largest_fitting, numbers_of_microbatches
from windlass.planner.feasibility.shortfall import Shortfall
from windlass.planner.question import PlanQuestion, Profiles, of_devices
from windlass.storage.ids import Precision, StatePrecision

_FEW_TOKENS = 64  # tokens of an example: the search goes no shorter


_Change = Callable[[PlanQuestion, Profiles], str | None]


def what_would_fit(question: PlanQuestion, profiles: Profiles, shortfall: Shortfall) -> list[str]:
    """Names the nearest change of each kind that makes a job fit, the cheapest first. The job must not fit as it is.

    First come settings that give the same results, up to rounding. If there are none, other batches and lengths follow.
    Then come less exact settings, and then memory.
    """
    exact: tuple[_Change, ...] = (_other_microbatches, _cut_matrices, _kept_gradients, _split_states, _fewer_gpus)
    found = _words_of(exact, question, profiles)
    found = found or _words_of((_smaller,), question, profiles)
    found += _words_of((_smaller_sums, _smaller_states), question, profiles)
    return [f"it fits with {words}" for words in (*found, *shortfall.remedies())]


def _words_of(changes: tuple[_Change, ...], question: PlanQuestion, profiles: Profiles) -> list[str]:
    return [words for change in changes if (words := change(question, profiles)) is not None]


def _other_microbatches(question: PlanQuestion, profiles: Profiles) -> str | None:
    if question.chooses_microbatches:
        return None
    free = replace(question, chooses_microbatches=True)
    if not fits(free, profiles):
        return None
    numbers = numbers_of_microbatches(free)
    number = next((number for number in numbers if fits(question.changed(num_microbatches=number), profiles)), None)
    return (
        None if number is None else f"{number} micro-batches (num_microbatches), with the same results up to rounding"
    )


def _cut_matrices(question: PlanQuestion, profiles: Profiles) -> str | None:
    if question.chooses_cut:
        return None
    if not fits(replace(question.changed(cut_matrices=None), chooses_cut=True), profiles):
        return None
    return "matrices that are computed in parts (cut_matrices: auto), with the same results up to rounding"


def _kept_gradients(question: PlanQuestion, profiles: Profiles) -> str | None:
    """Proposes to keep gradients until all are known: they may then wait on the SSDs."""
    if question.training.keeps_grads:
        return None
    if not fits(question.changed(update_order=UpdateOrder.KEPT), profiles):
        return None
    return f"gradients that wait for their updates (gradient_updates: {UpdateOrder.KEPT}), with the same results"


def _split_states(question: PlanQuestion, profiles: Profiles) -> str | None:
    training = question.training
    if training.precision is not Precision.BF16 or training.state_precision is not StatePrecision.FP32:
        return None
    if not fits(question.changed(state_precision=StatePrecision.SPLIT), profiles):
        return None
    return f"states in less space (state_precision: {StatePrecision.SPLIT}), with the same results"


def _fewer_gpus(question: PlanQuestion, profiles: Profiles) -> str | None:
    """Proposes fewer GPUs: each has processes and activations of its own in host memory."""
    for number in range(question.num_ranks - 1, 0, -1):
        if fits(replace(question, num_ranks=number), profiles):
            gpus = of_devices("GPUs" if number > 1 else "GPU", is_cpu=not question.has_gpu)
            return f"{number} {gpus} (gpus), with the same results"
    return None


def _smaller_states(question: PlanQuestion, profiles: Profiles) -> str | None:
    training = question.training
    if training.precision is not Precision.BF16 or training.state_precision is StatePrecision.BF16:
        return None
    if not fits(question.changed(state_precision=StatePrecision.BF16), profiles):
        return None
    return f"states in {StatePrecision.BF16} (state_precision), which is less exact"


def _smaller_sums(question: PlanQuestion, profiles: Profiles) -> str | None:
    """Proposes to sum the gradients of micro-batches in the model's precision."""
    training, precision = question.training, question.training.precision
    is_summed = question.chooses_microbatches or training.num_microbatches > 1
    if not is_summed or training.accumulation_precision == precision or training.lanes > 1:
        return None  # several lanes are summed in fp32 only
    if not fits(question.changed(accumulation_precision=precision), profiles):
        return None
    return f"gradients summed in {precision} (accumulation_precision), which is less exact"


def _smaller(question: PlanQuestion, profiles: Profiles) -> str | None:
    """Proposes a smaller batch in micro-batches of one or two examples, or shorter examples, or both."""

    def cut(batch_size: int) -> PlanQuestion:
        lanes = min(question.training.lanes, batch_size)
        number = lanes << ((batch_size // lanes).bit_length() - 1)  # equal lanes
        return question.changed(batch_size=batch_size, num_microbatches=number)

    own = question.training.batch_size
    if batch_size := largest_fitting(cut, profiles, most=own - 1):
        smaller = cut(batch_size)
        number = smaller.training.num_microbatches
        parts = f"{number} micro-batch{'es' if number > 1 else ''}{_left_out(question, smaller)}"
        return f"a batch of {smaller.training.batch_size} in {parts} (batch_size, num_microbatches)"

    def shorter(batch_size: int, num_tokens: int) -> PlanQuestion:
        return cut(batch_size).changed(sequence_length=num_tokens)

    lengths = list(_shorter(question.widest))
    for batch_size in dict.fromkeys((own, 1)):
        if lengths and fits(shorter(batch_size, lengths[-1]), profiles):
            num_tokens = next(length for length in lengths if fits(shorter(batch_size, length), profiles))
            smaller = shorter(batch_size, num_tokens)
            batch = "" if batch_size == own else f"a batch of {batch_size} and "
            return f"{batch}sequences of {num_tokens} tokens{_parts(question, smaller)}{_left_out(question, smaller)}"
    return None


def _parts(question: PlanQuestion, smaller: PlanQuestion) -> str:
    """Names the number of micro-batches, if the job fixes another one."""
    number = smaller.training.num_microbatches
    if question.chooses_microbatches or number == question.training.num_microbatches:
        return ""
    return f" in {number} micro-batch{'es' if number > 1 else ''} (num_microbatches)"


def _shorter(num_tokens: int) -> Iterator[int]:
    """Yields half the length again and again, down to the shortest."""
    while num_tokens > _FEW_TOKENS:
        num_tokens = max(_FEW_TOKENS, num_tokens // 2)
        yield num_tokens


def _left_out(question: PlanQuestion, smaller: PlanQuestion) -> str:
    """Names the settings that a smaller batch also needs, because lanes and GPUs need a micro-batch each."""
    numbers = {
        "lanes": (question.training.lanes, smaller.training.lanes),
        "gpus": (question.num_ranks, smaller.num_ranks),
    }
    changes = [f"{name}={after}" for name, (before, after) in numbers.items() if after < before]
    return f", with {' and '.join(changes)}" if changes else ""
