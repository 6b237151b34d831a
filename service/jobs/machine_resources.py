"""The cores and GPUs of a machine on which jobs run, and a job's share of them."""

from dataclasses import dataclass

from windlass.actors.lifecycle import cores_of, numa_nodes
from windlass.planner.hardware import Hardware
from windlass.service.installation import CORES_TO_DIVIDE, Settings, find_gpus, models_of, num_cores
from windlass.service.validation import count_text

# With a GPU, the worker's process copies data, prepares batches and launches kernels with this many threads. The
# optimizers get the other cores, except those of the SSD servers and, with several GPUs, of the server of params.
_GPU_WORKER_THREADS = 2
_SSD_SERVER_THREADS = 1
_PARAM_SERVER_THREADS = 1
# Without a GPU, one of this many cores updates parameters, because one core updates about as fast as the SSDs deliver
# states.
_CORES_TO_ONE_THAT_UPDATES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineResources:
    """The cores and GPUs on which jobs run."""

    num_cores: int
    num_gpus: int
    cpu_ranks: int = 1  # devices that the CPU counts as, if there are no GPUs
    gpu_models: tuple[str, ...] = ()  # the names of the GPUs' models, each once; empty if unknown

    @property
    def num_devices(self) -> int:
        """The devices that jobs compute on, each with one GPU worker: the GPUs, or the CPU."""
        return self.num_gpus or self.cpu_ranks

    @property
    def most_gpus(self) -> int:
        """The most devices that one job may have, because several GPUs of a job must be of one model."""
        return 1 if len(self.gpu_models) > 1 else self.num_devices

    def why_too_many(self, gpus: int, *, cpu_ranks: int | None = None) -> str | None:
        """Returns why a job cannot have so many GPUs here, or None if it can.

        Several GPUs of a job must be of one model, because kernels of different models may differ in the last bit.

        `cpu_ranks`: the setting; None: it is not about this machine. Ray may have been started with another value.
        """
        if gpus <= self.num_devices:
            if gpus == 1 or len(self.gpu_models) <= 1:
                return None
            return (
                f"windlass.gpus is {gpus}, and the machine has GPUs of several models ({', '.join(self.gpu_models)}), "
                "whose results may differ in the last bit: ask for 1, or let the service see only GPUs of one model "
                "(CUDA_VISIBLE_DEVICES)"
            )
        if self.num_gpus:
            return f"windlass.gpus is {gpus}, and the machine has {count_text(self.num_gpus, 'GPU')}"
        devices = count_text(self.cpu_ranks, "device")
        if cpu_ranks not in (None, self.cpu_ranks):
            return (
                f"windlass.gpus is {gpus}, and Ray was started with {devices}, but cpu_ranks is {cpu_ranks} now; run "
                "`windlass down` and `windlass up` once no job runs, and submit the job again"
            )
        setting = "" if cpu_ranks is None else " (setting cpu_ranks)"
        return f"windlass.gpus is {gpus}, and the machine has no GPU: its CPU counts as {devices}{setting}"

    def threads(
        self, num_optimizers: int, compute: int | None = None, each: int | None = None, *, num_ranks: int = 1
    ) -> tuple[int, int]:
        """Returns the threads of each of a job's GPU workers and optimizers. Settings may fix `compute` and `each`.

        Together they take at most the job's share of the cores, but at least one each. Without a GPU and with less than
        `CORES_TO_DIVIDE` cores for a device, the optimizers share the cores of the compute (see decision 8).
        """
        cores = self.num_cores * num_ranks // self.num_devices
        if self.num_gpus:
            left = cores - num_optimizers * (each or 1)
            compute = compute or max(1, min(_GPU_WORKER_THREADS, left // num_ranks))
            readers = _SSD_SERVER_THREADS + (_PARAM_SERVER_THREADS if num_ranks > 1 else 0)
            return compute, each or max(1, (cores - num_ranks * compute - readers) // num_optimizers)
        # Sums that a CPU computes have other bits with other numbers of threads. The share of one device decides the
        # threads, so that the bits do not depend on the job's number of devices.
        share = self.num_cores // self.num_devices
        update_cores = min(share // _CORES_TO_ONE_THAT_UPDATES, share - (compute or 0))
        each_of_one = each or max(1, update_cores // num_optimizers)
        if compute is None:
            compute = max(1, share if share < CORES_TO_DIVIDE else share - num_optimizers * each_of_one)
        most = max(1, cores // _CORES_TO_ONE_THAT_UPDATES // num_optimizers)
        return compute, each or min(num_ranks * each_of_one, most)

    @classmethod
    def here(cls, settings: Settings) -> "MachineResources":
        """Returns the resources of this machine."""
        gpus = find_gpus()
        return cls(num_cores=num_cores(), num_gpus=len(gpus), cpu_ranks=settings.cpu_ranks, gpu_models=models_of(gpus))


def most_gpus_of(hardware: Hardware, resources: MachineResources | None) -> int:
    """Returns the most GPUs that a job may get on a machine. `resources`: None if it is another one than this."""
    return max(1, hardware.gpus.count) if resources is None else resources.most_gpus


def threads_of(settings: Settings, resources: MachineResources, *, num_ranks: int = 1) -> tuple[int, int]:
    """Returns the threads of each of a job's GPU workers and of each of its optimizers."""
    num_optimizers, compute_threads, each_threads = (
        settings.num_cpu_optimizers,
        settings.compute_threads,
        settings.optimizer_threads,
    )
    compute, each = resources.threads(num_optimizers, compute_threads, each_threads, num_ranks=num_ranks)
    if settings.optimizer_threads is None:  # at most the cores of the smallest share of a NUMA node
        nodes = numa_nodes()
        each = min(each, *(len(cores_of(index, num_optimizers, nodes)) for index in range(num_optimizers)))
    return compute, each
