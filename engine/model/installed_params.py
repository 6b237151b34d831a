"""Installs a block's params in the modules of the model, and sends their gradients to the buffers of the job."""

import contextlib
import functools
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from windlass.engine.activations import BorrowedParams
from windlass.engine.linear_parts import CutEmbedding, CutLinear, MatrixParts, WholeMatrix
from windlass.engine.model.grad_buffer import GradSink, LaneSink, SliceSink
from windlass.engine.model.partition import ParamSite, Partition
from windlass.engine.model.streaming import StreamedLayer, StreamedParams
from windlass.storage.ids import BlockIndex


class ParamsChangedError(RuntimeError):
    """The model's code writes to its own parameters. An operation's params may serve the next one, or be read again."""


class InstalledParams:
    """The params of the block that is computed: views of flat device buffers in the module tree, until `remove`."""

    def __init__(
        self, partition: Partition, *, cut_matrices: int | None, is_head_in_place: bool, in_fp32: bool
    ) -> None:
        """`cut_matrices`: as in the job's `TrainingConfig`.

        `is_head_in_place`: the gradients of the head's matrices that are cut are added to their sink as products.
        `in_fp32`: see `GradBuffer.add_product`.
        """
        self.borrowed = BorrowedParams()
        self.sinks: Mapping[BlockIndex, GradSink] = {}  # by the block whose params they are for; empty without grads
        self._partition = partition
        self._in_fp32 = in_fp32
        self._cut = {
            block.index: self._cut_modules(
                block.index, cut_matrices, in_place=is_head_in_place and block.index == partition.head
            )
            for block in partition.layout.blocks
        }
        self._streamed: StreamedLayer | None = None  # the installed block, if its params are streamed
        self._versions: dict[BlockIndex, int] = {}  # of the installed params when they were installed

    def install(
        self,
        block: BlockIndex,
        flats: Mapping[BlockIndex, torch.Tensor | StreamedParams],
        grads: Mapping[BlockIndex, GradSink],
    ) -> None:
        """Puts views of flat params into the modules that `block`'s operation uses. Gradients go to `grads`.

        The matrices of a streamed block are installed only while their own module runs.
        """
        self.borrowed.flats = {b: flat for b, flat in flats.items() if isinstance(flat, torch.Tensor)}
        self.sinks = grads
        # One block at most: a head whose matrix is the embedding's has no others.
        streamed = next(((b, flat) for b, flat in flats.items() if isinstance(flat, StreamedParams)), None)
        cut = self._cut[block]
        sites = [site for site in self._partition.sites[block] if site.param.name not in cut]
        if streamed is not None:
            pieces = [site for site in sites if _is_in_pieces(site, flats)]
            self._streamed = StreamedLayer(*streamed, pieces, user=block, goes_backward=bool(grads))
            self.borrowed.streamed = self._streamed
        for site, module in cut.values():
            module.install(self._matrix_of(site, flats))
        for site in sites:
            if _is_in_pieces(site, flats):
                continue
            flat, start = flats[site.block], site.param.offset
            if isinstance(flat, StreamedParams):
                start -= flat.bounds[-1]
                flat = flat.rest
            view = flat[start : start + site.param.numel].view(site.param.shape)
            site.module._parameters[site.attribute] = nn.Parameter(view, requires_grad=False)
        if grads:
            self.require_grads(block)
        self._versions = {b: flat._version for b, flat in self.borrowed.flats.items()}

    def remove(self, block: BlockIndex) -> None:
        """Removes the views from the modules, so that the buffers may be reused.

        Raises:
            ParamsChangedError: the model has written to its parameters.
        """
        changed = [b for b, flat in self.borrowed.flats.items() if flat._version != self._versions[b]]
        if changed:
            raise ParamsChangedError(
                f"block {block} changes the parameters of block {changed[0]} in place while it is computed; such a "
                "model cannot be trained block by block"
            )
        if self._streamed is not None:
            self._streamed.end()
        self._streamed = self.borrowed.streamed = None
        for _, module in self._cut[block].values():
            module.remove()
        self.borrowed.flats, self.sinks = {}, {}
        for site in self._partition.sites[block]:
            site.module._parameters[site.attribute] = site.placeholder

    def require_grads(self, block: BlockIndex) -> None:
        """Lets autograd compute the gradients of the installed params of `block`'s operation."""
        for site in self._partition.sites[block]:
            param = site.module.get_parameter(site.attribute)
            if param is not site.placeholder:
                self._require_grad(site, param)
        for _, module in self._cut[block].values():
            module.require_grad()
        if self._streamed is not None:
            self._streamed.on_param = self._require_grad

    @contextlib.contextmanager
    def all_equal(self, block: BlockIndex, value: float, device: torch.device) -> Iterator[None]:
        """Installs params that are all equal and take no memory, for a block whose params are on another box."""
        sites = self._partition.sites[block]
        before = [site.module._parameters[site.attribute] for site in sites]
        for site in sites:
            params = torch.full((), value, dtype=site.placeholder.dtype, device=device).expand(site.param.shape)
            site.module._parameters[site.attribute] = nn.Parameter(params, requires_grad=False)
        try:
            yield
        finally:
            for site, param in zip(sites, before, strict=True):
                site.module._parameters[site.attribute] = param

    def begin_microbatch(self, microbatch: int, *, is_last: bool) -> None:
        """Begins a micro-batch, an index in the step. `is_last`: of its operation."""
        if self._streamed is not None:
            self._streamed.begin_graph(is_last=is_last)
        for sink in self.sinks.values():
            if isinstance(sink, LaneSink):
                sink.begin_microbatch(microbatch)

    def begin_slice(self, *, is_last: bool, ends_operation: bool) -> None:
        """Begins a slice of the head. `is_last`: of its micro-batch. `ends_operation`: no micro-batch follows, too."""
        if self._streamed is not None:
            self._streamed.begin_graph(is_last=ends_operation)
        for sink in self.sinks.values():
            if isinstance(sink, SliceSink):
                sink.begin_slice(is_last=is_last)

    def end_lane(self) -> None:
        """Ends the lane of the micro-batch before."""
        for sink in self.sinks.values():
            if isinstance(sink, LaneSink):
                sink.end_lane()

    # --- private ----------------------------------------------------------------------------------------------------

    def _cut_modules(
        self, block: BlockIndex, cut_matrices: int | None, *, in_place: bool
    ) -> dict[str, tuple[ParamSite, CutLinear | CutEmbedding]]:
        """Returns the modules of a block that are computed in parts, by the name of their matrix."""
        cut: dict[str, tuple[ParamSite, CutLinear | CutEmbedding]] = {}
        if cut_matrices is None:
            return cut
        for site in self._partition.sites[block]:
            if not site.param.is_cut(cut_matrices):
                continue
            name, shape = site.param.name, (site.param.shape[0], site.param.shape[1])
            parts, add_grad = list(site.param.parts(cut_matrices)), functools.partial(self._add_part, site.block)
            if isinstance(site.module, nn.Embedding):
                cut[name] = site, CutEmbedding(site.module, shape, parts, add_grad)
                continue
            add_product = functools.partial(self._add_product, site.block) if in_place else None
            linear = CutLinear(site.module, shape, parts, add_grad, cut_matrices=cut_matrices, add_product=add_product)
            cut[name] = site, linear
        return cut

    def _matrix_of(self, site: ParamSite, flats: Mapping[BlockIndex, torch.Tensor | StreamedParams]) -> MatrixParts:
        flat = flats[site.block]
        if isinstance(flat, StreamedParams):
            assert self._streamed is not None, "the layer is installed"
            return self._streamed.matrix(site)
        return WholeMatrix(flat[site.param.offset : site.param.offset + site.param.numel].view(site.param.shape))

    def _add_part(self, block: BlockIndex, name: str, offset: int, grad: torch.Tensor) -> None:
        self.sinks[block].add(name, offset, grad)

    def _add_product(self, block: BlockIndex, name: str, offset: int, left: torch.Tensor, right: torch.Tensor) -> None:
        self.sinks[block].add_product(name, offset, left, right, in_fp32=self._in_fp32)

    def _require_grad(self, site: ParamSite, param: nn.Parameter) -> None:
        param.requires_grad_(True)
        # A kept graph refers to the param of the forward pass. The hook sends its gradient to the current sinks.
        param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            functools.partial(self._take_grad, site)
        )

    def _take_grad(self, site: ParamSite, param: torch.Tensor) -> None:
        assert param.grad is not None
        self.sinks[site.block].add(site.param.name, site.param.offset, param.grad)
        param.grad = None


def _is_in_pieces(site: ParamSite, flats: Mapping[BlockIndex, torch.Tensor | StreamedParams]) -> bool:
    flat = flats[site.block]
    return isinstance(flat, StreamedParams) and site.param.offset < flat.bounds[-1]
