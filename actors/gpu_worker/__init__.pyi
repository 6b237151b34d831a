"""The actor that computes: the block loop, its streams, and the buffers on the device."""

from windlass.actors.gpu_worker.worker import GpuWorker as GpuWorker
