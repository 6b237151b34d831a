"""Simulates another system's step block by block: its policy, with the rates of a machine.

A system with overlap has three buffers for transfers to the device (reading, copying, in use) and three for transfers
from it. It works on four updates at once (reading, copying in, copying out, writing). A system without overlap does one
thing at a time. A step begins after the previous one has ended.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from windlass.actors.messages import SpanKind, WorkSpan
from windlass.actors.timeline import COMPUTE, FROM_DEVICE, TO_DEVICE
from windlass.planner.baselines import Policy, Rest, StageRates, StageTimes, nbytes_on_ssd, stage_rates, stage_times
from windlass.planner.cost import LayerProfile, ModelProfile
from windlass.planner.hardware import Hardware
from windlass.planner.simulation.clock import Future, Process
from windlass.planner.simulation.resources import Log, Resource
from windlass.planner.simulation.waiting import Queue, Slots

_SSDS, _OPTIMIZER = "ssds", "optimizer"  # resource names: all SSDs together, all cores together
_NUM_BUFFERS = 3  # for transfers in each direction
_NUM_UPDATES = 4  # updates in progress at once
_PARAM, _STATES = 2, 12  # bytes of a parameter: in 16 bit; in fp32 with its moments


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedStep:
    """The step time of a simulated system, and its spans."""

    step_s: float
    spans: Sequence[WorkSpan]

    @property
    def gpu_share(self) -> float:
        """The share of the step in which the GPU computes."""
        return sum(span.end_s - span.start_s for span in self.spans if span.resource == COMPUTE) / self.step_s


def simulate_policy(
    policy: Policy,
    hardware: Hardware,
    profile: ModelProfile,
    *,
    one_by_one_gb_per_s: float | None = None,
    swapped_nbytes: int | None = None,
) -> ComparedStep:
    """Simulates one step of the whole batch on one GPU.

    The swapped and recomputed amounts are those of `stage_times`, which also documents the options. GPU updates take no
    time, as there, but their transfers do.
    """
    rates = stage_rates(policy, hardware, one_by_one_gb_per_s=one_by_one_gb_per_s)
    times = stage_times(policy, hardware, profile, swapped_nbytes=swapped_nbytes)
    step = _SimulatedStep(policy, rates, list(_works(policy, hardware, profile, times)))
    step.log.clock.process(step.run())
    step.log.clock.run()
    return ComparedStep(step_s=step.log.clock.now, spans=step.log.spans)


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockWork:
    """The work of one block in a step."""

    index: int
    numel: int
    forward_s: float
    again_s: float
    swapped_nbytes: int
    swapped_to_ssd_nbytes: int


_Part = Callable[[_BlockWork], Process]


class _SimulatedStep:
    def __init__(self, policy: Policy, rates: StageRates, blocks: Sequence[_BlockWork]) -> None:
        self.log = Log()
        self._policy = policy
        self._rates = rates
        self._blocks = blocks
        self._compute = Resource(self.log, COMPUTE)
        self._h2d, self._d2h = Resource(self.log, TO_DEVICE), Resource(self.log, FROM_DEVICE)
        self._ssds, self._cores = Resource(self.log, _SSDS), Resource(self.log, _OPTIMIZER)
        self._updating = Slots(self.log.clock, _NUM_UPDATES)

    def run(self) -> Process:
        """Runs one step, until its last update has ended."""
        updates = self._policy.updates_in_backward
        backward = self._blocks[::-1]
        yield from self._pass(self._blocks, self._come, self._forward, self._leave, _nothing)
        yield from self._pass(
            backward, self._come_back, self._backward, self._leave_grads, self._update if updates else _nothing
        )
        if not updates:
            yield from self._pass(self._blocks, _nothing, _nothing, _nothing, self._update)

    def _pass(self, blocks: Sequence[_BlockWork], come: _Part, compute: _Part, leave: _Part, go_on: _Part) -> Process:
        """Runs all blocks through four phases, and returns when all of them have ended.

        `come` copies to the device, `compute` computes there, `leave` copies to the host, and `go_on` works there.
        """
        clock = self.log.clock
        if not self._policy.overlaps:
            for block in blocks:
                for part in (come, compute, leave, go_on):
                    yield from part(block)
            return
        coming, leaving = Slots(clock, _NUM_BUFFERS), Slots(clock, _NUM_BUFFERS)
        started = Queue[Future](clock)  # `come` processes in the order of the blocks

        def feed() -> Process:
            for block in blocks:
                yield from coming.take()
                started.put(clock.process(come(block)))

        def let_go(block: _BlockWork) -> Process:
            yield from leave(block)
            leaving.give_back()
            yield from go_on(block)

        clock.process(feed())
        left: list[Future] = []
        for block in blocks:
            yield (yield from started.get())
            yield from leaving.take()
            yield from compute(block)
            coming.give_back()
            left.append(clock.process(let_go(block)))
        yield from left

    # --- forward ------------------------------------------------------------------------------------------------------

    def _come(self, block: _BlockWork) -> Process:
        nbytes = _PARAM * block.numel
        if self._policy.params is Rest.SSD:
            yield from self._read(nbytes, SpanKind.READ_PARAMS, block)
        if self._policy.params is not Rest.GPU:
            yield from self._in(nbytes, SpanKind.COPY_PARAMS_IN, block)

    def _forward(self, block: _BlockWork) -> Process:
        yield from self._compute.work(block.forward_s, SpanKind.FORWARD, 1, block.index)

    def _leave(self, block: _BlockWork) -> Process:
        yield from self._out(block.swapped_nbytes, SpanKind.COPY_ACTIVATIONS_OUT, block)
        yield from self._write(block.swapped_to_ssd_nbytes, SpanKind.WRITE_ACTIVATIONS, block)

    # --- backward -----------------------------------------------------------------------------------------------------

    def _come_back(self, block: _BlockWork) -> Process:
        yield from self._come(block)
        yield from self._read(block.swapped_to_ssd_nbytes, SpanKind.READ_ACTIVATIONS, block)
        yield from self._in(block.swapped_nbytes, SpanKind.COPY_ACTIVATIONS_IN, block)

    def _backward(self, block: _BlockWork) -> Process:
        yield from self._compute.work(2 * block.forward_s + block.again_s, SpanKind.BACKWARD, 1, block.index)

    def _leave_grads(self, block: _BlockWork) -> Process:
        nbytes = _PARAM * block.numel
        if self._policy.grads is not Rest.GPU:
            yield from self._out(nbytes, SpanKind.COPY_GRAD_OUT, block)
        if self._policy.grads is Rest.SSD:
            yield from self._write(nbytes, SpanKind.WRITE_GRAD, block)

    # --- optimizer ----------------------------------------------------------------------------------------------------

    def _update(self, block: _BlockWork) -> Process:
        policy, states, half = self._policy, _STATES * block.numel, _PARAM * block.numel
        states_on_ssd = states if policy.states is Rest.SSD else 0
        yield from self._updating.take()
        yield from self._read(states_on_ssd, SpanKind.READ_STATES, block)
        yield from self._read(half if policy.grads is Rest.SSD else 0, SpanKind.READ_GRAD, block)
        if policy.updates_on_gpu:
            moved = 0 if policy.states is Rest.GPU else states
            grads, params = (0 if rest is Rest.GPU else half for rest in (policy.grads, policy.params))
            yield from self._in(moved + grads, SpanKind.COPY_PARAMS_IN, block)
            yield from self._out(moved + params, SpanKind.COPY_STATES_OUT, block)
        else:
            seconds = block.numel / self._rates.adam_params
            yield from self._cores.work(seconds, SpanKind.UPDATE, 1, block.index)
            if policy.params is Rest.GPU:
                yield from self._in(half, SpanKind.COPY_PARAMS_IN, block)
        params_on_ssd = half if policy.params is Rest.SSD else 0
        yield from self._write(states_on_ssd + params_on_ssd, SpanKind.WRITE_STATES, block)
        self._updating.give_back()

    # --- moves --------------------------------------------------------------------------------------------------------

    def _read(self, nbytes: int, kind: SpanKind, block: _BlockWork) -> Process:
        rate = self._rates.param_read_bytes if kind is SpanKind.READ_PARAMS else self._rates.ssd_read_bytes
        return self._move(self._ssds, nbytes, rate, kind, block)

    def _write(self, nbytes: int, kind: SpanKind, block: _BlockWork) -> Process:
        return self._move(self._ssds, nbytes, self._rates.ssd_write_bytes, kind, block)

    def _in(self, nbytes: int, kind: SpanKind, block: _BlockWork) -> Process:
        return self._move(self._h2d, nbytes, self._rates.h2d_bytes, kind, block)

    def _out(self, nbytes: int, kind: SpanKind, block: _BlockWork) -> Process:
        return self._move(self._d2h, nbytes, self._rates.d2h_bytes, kind, block)

    @staticmethod
    def _move(resource: Resource, nbytes: int, rate: float, kind: SpanKind, block: _BlockWork) -> Process:
        if nbytes:
            yield from resource.work(nbytes / rate, kind, 1, block.index, nbytes=nbytes)


def _nothing(_: _BlockWork) -> Process:
    yield from ()


def _works(policy: Policy, hardware: Hardware, profile: ModelProfile, times: StageTimes) -> Iterator[_BlockWork]:
    """Yields each block's work.

    Swapped bytes beside the layers' inputs are divided in proportion to what the layers save. The part on the SSDs is
    the same share of all of them. Recomputation is divided in proportion to the layers' work.
    """
    flops = stage_rates(policy, hardware).gpu_flops
    saved = sum(layer.saved_nbytes for layer in profile.layers)
    more = (times.swapped_nbytes - profile.interblock_nbytes) / saved if saved else 0.0
    to_ssd = nbytes_on_ssd(policy, hardware, profile, times.swapped_nbytes) / max(1, times.swapped_nbytes)
    again_s = times.recompute_s / max(1, sum(layer.num_flops for layer in profile.layers))
    for index, block in enumerate(profile.blocks):
        again, swapped = 0.0, 0
        if isinstance(block, LayerProfile):
            again, swapped = again_s, round(block.input_nbytes + more * block.saved_nbytes)
        yield _BlockWork(
            index=index,
            numel=block.numel,
            forward_s=block.num_flops / flops,
            again_s=again * block.num_flops,
            swapped_nbytes=swapped,
            swapped_to_ssd_nbytes=round(swapped * to_ssd),
        )
