"""The table of all calls that order a device's work, each with the scenario that shows what its absence does.

A new call belongs into the first table, with a scenario whose reports name it when it is left out. The second table has
the calls of the same names that order no device's work, and one whose absence no scenario shows.
"""

# By file and call: a scenario of `scenarios.py`.
CAUGHT_BY: dict[str, dict[str, str]] = {
    "engine/device/buffer_pool.py": {
        "DeviceBuffers.__init__: device.compute.record": "part: buffers",
        "DeviceBuffers.take_with: stream.wait": "part: buffers",
        "DeviceBuffers.give: stream.record": "part: buffers",
    },
    "engine/device/cuda_streams.py": {
        "CudaEvent.__init__: self.event.record": "part: buffers",
        "CudaEvent.is_over: self.event.query": "part: activations",
        "CudaEvent.wait: self.event.synchronize": "part: buffers",
        "CudaStream.wait: self._stream.wait_event": "part: buffers",
        "CudaStream._call_next: event.wait": "part: pieces",
        "CudaStreams.__init__: self.compute.record().wait": "part: pieces",
        "CudaStreams.__init__: self.compute.record": "part: buffers",
    },
    "engine/device/device.py": {
        "Device.record_current: self._streams.record_current": "offload: on SSDs",
        "Device.take: self.h2d.wait": "part: blocking copies",
        "Device.take: self.compute.record": "part: blocking copies",
        "Device.give: self.synchronize": "part: blocking copies",
        "Device._copy_now: stream.record().wait": "part: blocking copies",
        "Device._copy_now: stream.record": "part: blocking copies",
        "Device.synchronize: self.compute.record().wait": "part: blocking copies",
        "Device.synchronize: self.compute.record": "part: blocking copies",
        "Device._await_copies: stream.record().wait": "part: unpinning",
        "Device._await_copies: stream.record": "part: unpinning",
    },
    "engine/device/param_loader.py": {
        "ParamLoader.run: h2d.record": "job: active",
        "ParamLoader.run: h2d.record (2)": "job: active",
        "ParamLoader.run: h2d.then": "offload: on SSDs",
    },
    "engine/activations/store.py": {
        "wait_on_device: copied.is_over": "part: activations",
        "wait_on_device: device.compute.record": "part: activations",
        "wait_on_device: device.compute.wait": "part: activations",
        "wait_on_device: device.compute.then": "part: activations",
        "wait_on_device: device.compute.record (2)": "part: activations",
    },
    "engine/activations/host_store.py": {
        "HostActivations.put: self._outward.wait": "part: activations",
        "HostActivations.put: self._device.compute.record": "part: activations",
        "HostActivations.put: self._outward.record": "part: activations",
        "HostActivations.put: self._outward.record (2)": "part: activations",
        "HostActivations.put: self._outward.then": "part: activations",
        "HostActivations.put: self._outward.then, memory": "part: activations",
        "HostActivations.put: self._outward.record (3)": "part: activations",
        "HostActivations.prefetch: self._inward.wait": "part: activations",
        "HostActivations.prefetch: self._inward.wait (2)": "part: activations",
        "HostActivations.prefetch: self._device.compute.record": "part: activations",
        "HostActivations.prefetch: self._inward.record": "part: activations",
        "HostActivations.prefetch: self._inward.record (2)": "part: activations",
        "HostActivations.prefetch: self._inward.then": "part: activations",
        "HostActivations.prefetch: self._inward.then, memory": "part: activations",
        "HostActivations.prefetch: self._inward.record (3)": "part: activations",
        "HostActivations.drop: self._outward.then": "part: activations",
    },
    "engine/device/overlaid_buffers.py": {
        "OverlaidBuffers.__init__: device.compute.record": "part: overlaid buffers",
        "OverlaidBuffers.take: stream.wait": "job: gradients in one memory",
        "OverlaidBuffers.take: stream.wait (2)": "part: overlaid buffers",
        "OverlaidBuffers.give: stream.record": "job: gradients in one memory",
    },
    "engine/pieces/grad_pieces.py": {
        "GradPieceBuffers.__init__: device.compute.record": "part: gradients in pieces",
        "GradPieceBuffers.wait_for_others: self.device.compute.wait": "job: gradients in one memory",
        "GradPieceBuffers.wait_for_others: self.device.compute.record": "job: streamed gradients",
        "GradPieceBuffers.then: self.d2h.then": "job: gradients in one memory",
        "StreamedGrad._open: self._buffers.device.compute.wait": "job: streamed gradients",
        "StreamedGrad._fill: stream.wait": "job: streamed gradients",
        "StreamedGrad._fill: stream.wait (2)": "part: gradients in pieces",
        "StreamedGrad._merge: compute.wait": "job: lanes in one memory",
        "StreamedGrad._store: stream.wait": "job: streamed gradients",
        "StreamedGrad._store: device.compute.record": "job: streamed gradients",
        "StreamedGrad._store: stream.record": "job: streamed gradients",
        "StreamedGrad._copy: stream.record": "job: streamed gradients",
        "StreamedGrad._copy: stream.record (2)": "job: streamed gradients",
        "StreamedGrad._copy: stream.then": "job: streamed gradients",
    },
    "engine/pieces/beside_total.py": {
        "SumBesideTotal.__init__: self._device.compute.record": "job: lanes in one memory",
        "SumBesideTotal.finish: self._h2d.wait": "job: lanes in one memory",
        "SumBesideTotal.finish: self._h2d.then": "job: ranks in pieces",
        "SumBesideTotal._add_part: self._h2d.wait": "job: lanes in one memory",
        "SumBesideTotal._add_part: self._h2d.record": "job: lanes in one memory",
        "SumBesideTotal._add_part: self._h2d.record (2)": "job: lanes in one memory",
        "SumBesideTotal._add_part: self._h2d.then": "job: lanes in one memory",
        "SumBesideTotal._add_part: self._device.compute.wait": "job: lanes in one memory",
        "SumBesideTotal._add_part: self._device.compute.record": "job: lanes in one memory",
        "SumBesideTotal._put_aside: self._d2h.wait": "job: lanes in one memory",
        "SumBesideTotal._put_aside: self._device.compute.record": "job: lanes in one memory",
        "SumBesideTotal._put_aside: self._d2h.record": "job: lanes in one memory",
        "SumBesideTotal._put_aside: self._d2h.record (2)": "job: lanes in one memory",
        "SumBesideTotal._put_aside: self._d2h.then": "job: lanes in one memory",
        "SumBesideTotal._put_aside: self._device.compute.wait": "job: lanes in one memory",
    },
    "engine/model/streaming/params.py": {
        "PieceBuffers.__init__: device.compute.record": "part: pieces",
        "PieceBuffers.end: self._device.compute.wait": "part: pieces",
        "PieceBuffers.end: self._device.compute.record": "part: pieces",
        "PieceBuffers.hold: self._device.compute.wait": "part: pieces",
        "PieceBuffers.release: self._device.compute.record": "part: pieces",
        "PieceBuffers._fill: stream.wait": "part: pieces",
        "PieceBuffers._fill: stream.record": "part: pieces",
        "PieceBuffers._fill: stream.record (2)": "part: pieces",
        "PieceBuffers._fill: stream.then": "part: pieces",
    },
    "actors/gpu_worker/device_optimizer.py": {
        "DeviceStates.__init__: device.synchronize": "job: mixed",
        "DeviceStates._update.work: compute.record": "job: mixed",
        "DeviceStates._update.work: compute.record (2)": "job: mixed",
        "DeviceStates._update: compute.then": "job: mixed",
        "DeviceStates._flush: d2h.record": "job: mixed",
        "DeviceStates._flush: d2h.record (2)": "job: mixed",
        "DeviceStates._flush: d2h.then": "job: mixed",
    },
    "actors/gpu_worker/grad_accumulation.py": {
        "PartialGrads.take: self._device.compute.wait": "part: partial sums",
        "PartialGrads.copy_out: self._device.d2h.then": "part: partial sums",
        "PartialGrads._bring_back: self._device.h2d.then": "part: passed sums",
        "PartialGrads._copy: stream.record": "part: partial sums",
        "PartialGrads._copy: stream.record (2)": "part: partial sums",
        "PartialGrads._copy: stream.then": "part: partial sums",
        "PartialGrads._copy: stream.record (3)": "part: partial sums",
    },
    "actors/gpu_worker/grad_offload.py": {
        "GradOffload.queue_partial_sums: self._device.compute.record": "job: groups",
        "GradOffload.complete: compute.record": "job: early gradients",
        "GradOffload._streamed_computed: self._streamed.then": "job: gradients in one memory",
        "GradOffload._run: self._device.d2h.then": "job: early gradients",
        "GradOffload._copy_out_partial: self._device.d2h.wait": "job: groups",
        "GradOffload._copy_out: d2h.wait": "job: early gradients",
        "GradOffload._copy_out: d2h.record": "job: early gradients",
        "GradOffload._copy_out: d2h.record (2)": "job: early gradients",
        "GradOffload._copy_out: d2h.then": "job: early gradients",
    },
    "actors/gpu_worker/edges/shared_params.py": {
        "SharedParams.wait_for: self._device.compute.wait": "part: shared params",
        "SharedParams.send_sum: d2h.wait": "part: shared params",
        "SharedParams.send_sum: self._device.compute.record": "part: shared params",
        "SharedParams._copy_in: h2d.record": "part: shared params",
        "SharedParams._copy_in: h2d.then": "part: shared params",
        "SharedParams._send_chunks: stream.then": "part: shared params",
    },
    "actors/gpu_worker/edges/stage_edges.py": {
        "StageEdges._receive: h2d.wait": "part: hidden states",
        "StageEdges._receive: compute.record": "part: hidden states",
        "StageEdges._receive: compute.wait": "part: hidden states",
        "StageEdges._receive: h2d.record": "part: hidden states",
        "StageEdges._receive: h2d.then": "part: hidden states",
        "StageEdges.send: self._device.d2h.wait": "part: hidden states",
        "StageEdges.send: self._device.compute.record": "part: hidden states",
        "StageEdges.send: self._device.d2h.then": "part: hidden states",
        "StageEdges.send: self._device.d2h.then, memory": "part: hidden states",
    },
    "actors/gpu_worker/operation.py": {
        "LaunchedOperation.waited: self._device.compute.record": "job: active",
    },
    "actors/gpu_worker/param_prefetcher.py": {
        "ParamFeed.wait_for: self._device.compute.wait": "job: active",
        "ParamFeed.release: self._device.compute.then": "job: streamed",
    },
    "actors/gpu_worker/streamed_grads.py": {
        "StreamedGrads._when_moved: buffers.h2d.then": "job: ranks in pieces",
        "StreamedGrads._when_moved: buffers.d2h.then": "job: ranks in pieces",
        "StreamedGrads.then: self._buffers_of(block).then": "job: gradients in one memory",
    },
    "actors/gpu_worker/worker.py": {
        "GpuWorker._launch: compute.record": "job: active",
        "GpuWorker._launch: compute.record (2)": "job: active",
        "GpuWorker._launch: compute.record (3)": "job: active",
        "GpuWorker._launch: compute.then": "job: active",
    },
    "actors/activations/ssd_store.py": {
        "SsdActivations.put: self._device.compute.record": "job: swapped to SSDs",
        "SsdActivations.prefetch: self._inward.wait": "job: swapped to SSDs",
        "SsdActivations.prefetch: self._device.compute.record": "job: swapped to SSDs",
        "SsdActivations._copy_out: self._outward.wait": "job: swapped to SSDs",
        "SsdActivations._copy_out: self._outward.record": "job: swapped to SSDs",
        "SsdActivations._copy_out: self._outward.record (2)": "job: swapped to SSDs",
        "SsdActivations._copy_out: self._outward.then": "job: swapped to SSDs",
        "SsdActivations._copy_out: self._outward.then, memory": "job: swapped to SSDs",
        "SsdActivations._copy_in: self._inward.record": "job: swapped to SSDs",
        "SsdActivations._copy_in: self._inward.then": "job: swapped to SSDs",
        "SsdActivations._copy_in: self._inward.record (2)": "job: swapped to SSDs",
        "SsdActivations._copy_in: self._inward.record (3)": "job: swapped to SSDs",
    },
    "actors/offload/param_prefetcher.py": {
        "ParamFeed.give_back: self._device.record_current": "offload: on SSDs",
        "ParamFeed._forget: self._device.h2d.wait": "offload: on SSDs",
    },
    "actors/offload/updates.py": {
        "LayerUpdates.offload: self._device.record_current": "offload: on SSDs",
        "LayerUpdates._run_offloads: grad.computed.wait": "offload: on SSDs",
    },
}

_CPU = "streams of a CPU, whose threads wait for each other; tests/unit/engine/device/test_streams.py"
_THREADS = "a thread waits for another one, not for a device"
_HOST_SLOTS = "the callback holds names of slots in host memory; a load has tensors of the device, which others hold"
_QUEUE = "puts a part in a queue"
_NOT_SHOWN = "the tensor is held elsewhere too, unless it is dropped during its copy, which no scenario does"
_LATER_COPY = "in jobs another copy precedes the buffer's next one on its stream, and waits for a later store"

# By file and call: the reason.
NOT_OF_THE_DEVICE: dict[str, dict[str, str]] = {
    "engine/pieces/grad_pieces.py": {
        "StreamedGrad._merge: compute.record": _LATER_COPY,
    },
    "engine/device/streams.py": {
        "DirectStream._begin: awaited.wait": _CPU,
        "DirectStream.wait: event.wait": _CPU,
        "_ThreadEvent.wait: self._completed.wait": _CPU,
        "CpuStreams.record_current: self.compute.record": _CPU,
    },
    "actors/gpu_worker/device_optimizer.py": {
        "DeviceStates._read: arrived.wait": _THREADS,
    },
    "actors/offload/updates.py": {
        "LayerUpdates._read_now: arrived.wait": _THREADS,
    },
    "actors/activations/ssd_store.py": {
        "SsdActivations._copy_in: self._inward.then, memory": _NOT_SHOWN,
        "SsdActivations.wait_for: self._turns.wait": _QUEUE,
        "SsdActivations._has_moved: self._turns.wait": _QUEUE,
        "SsdActivations._line_up: self._turns.wait": _QUEUE,
    },
    "actors/gpu_worker/param_prefetcher.py": {
        "ParamFeed.release: self._device.compute.then, memory": _HOST_SLOTS,
    },
    "actors/offload/param_prefetcher.py": {
        "ParamFeed.host_chunk: done.wait": _THREADS,
    },
}
