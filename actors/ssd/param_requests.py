"""The decisions about params that the GPU worker, the actor that reads params, and the simulator share."""

from collections.abc import Iterable

from windlass.actors.job import CoreContext, num_evaluation_groups
from windlass.actors.messages import ParamRequest, ParamsCopied, ParamUse, Phase, RequestParams
from windlass.actors.worker_policy import ParamTurns, num_ranks_in_round, round_of
from windlass.storage.ids import BlockIndex, ChunkKey


class ParamRequests:
    """Makes the messages of one GPU worker to the actor that reads params."""

    def __init__(self, context: CoreContext, rank: int) -> None:
        spec = context.spec
        self._job = spec.job
        self._name = context.gpu_worker(rank)
        self._num_ranks = spec.num_ranks
        self._num_groups = {False: context.plan.num_groups, True: num_evaluation_groups(spec)}  # by: evaluates
        self._blocks_in_slots = frozenset(key.block for key in context.chunks_in_param_slots())

    def use_of(self, request: ParamRequest) -> ParamUse:
        """Returns the use that a request is for."""
        operation = request.operation
        round_index = round_of(operation.group, self._num_ranks)
        return ParamUse(operation.step, operation.phase, round_index, operation.block, request.block)

    def of_chunks(self, request: ParamRequest, keys: Iterable[ChunkKey]) -> RequestParams:
        """Returns the message that asks for chunks."""
        use, num_users = self.use_of(request), 0
        if request.block in self._blocks_in_slots:
            evaluates = use.phase in (Phase.EVALUATE, Phase.EVALUATE_HEAD)
            num_users = num_ranks_in_round(use.round_index, self._num_groups[evaluates], self._num_ranks)
        return RequestParams(
            job=self._job, step=request.step, reply_to=self._name, use=use, num_users=num_users, keys=tuple(keys)
        )

    def must_tell(self, block: BlockIndex) -> bool:
        """Returns whether a request is due even if the device still has the block's params: others may need them."""
        return self._num_ranks > 1 and block in self._blocks_in_slots

    def copied(self, request: ParamRequest, keys: Iterable[ChunkKey]) -> ParamsCopied:
        """Returns the message that the GPU worker does not read the slots of chunks any more."""
        use = self.use_of(request)
        return ParamsCopied(job=self._job, step=use.step, actor=self._name, use=use, keys=tuple(keys))


def param_turns(context: CoreContext) -> ParamTurns:
    """Returns the slots of a job's params, all of them free."""
    layout, plan, cached = context.layout, context.plan, context.cached_params()
    others = range(plan.params.num_slots - len(cached))
    # Blocks in pieces hold their chunks until they are computed.
    held = (layout.num_chunks(BlockIndex(b)) for b in plan.streamed_blocks if b not in plan.host_blocks)
    return ParamTurns(
        list(plan.params.slots_of(others).values()),
        batch=plan.fetch_batch,
        num_kept=max((plan.fetch_batch, *held)),
        cached=cached,
    )
