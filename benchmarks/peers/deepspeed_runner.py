"""Runs DeepSpeed ZeRO-3, the peer with offload: `python -m benchmarks.peers.deepspeed_runner FOLDER cpu|nvme SSD_DIR
[GIB]`

With GIB it computes on the GPU and uses at most that much of its memory. Otherwise it computes on the CPU.

DeepSpeed's defaults are for much larger models (10^9 live parameters, reduction buckets of 5 * 10^8). They are reduced
to what these models need, in DeepSpeed's favour. Bucket and persistence sizes are those that Hugging Face's integration
calls "auto".

Results of other settings on NVMe with two cores:

- `pipeline_read` and `pipeline_write` overlap the optimizer's I/O with its computation. They need three times the
  buffers, here 2 to 6 GB. Single runs at 171 M were up to a fifth faster, with 4 GiB instead of 2.4. The setting here
  is chosen for memory.
- AIO blocks of 4 MiB, or larger prefetch buckets, fail with the assertion "already assigned swap buffer".
- Unlimited live parameters fail with "Not enough buffers", unless there is a buffer for every tensor of the model.
"""

import os
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import decay_groups, emit, load_model, mean_loss, run_steps
from benchmarks.peers.workload import Workload, read_workload

MIB = 1 << 20


def deepspeed_config(workload: Workload, device: str, ssd_dir: Path, *, on_gpu: bool = False) -> dict[str, Any]:
    """Returns the configuration of ZeRO-3 with params and optimizer states on `device`: "cpu" or "nvme"."""
    shape = workload.shape
    place = {"device": device, "pin_memory": on_gpu}
    on_nvme = {"nvme_path": str(ssd_dir)} if device == "nvme" else {}
    param_buffers = {
        "buffer_count": 16,  # seven matrices for each of two layers, and the embeddings
        "buffer_size": max(shape.vocab, shape.intermediate, shape.hidden) * shape.hidden,
        "max_in_cpu": 0,
    }
    return {
        "train_micro_batch_size_per_gpu": workload.batch_size // workload.num_microbatches,
        "gradient_accumulation_steps": workload.num_microbatches,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**place, **on_nvme, **(param_buffers if on_nvme else {})},
            "offload_optimizer": {**place, **on_nvme, **({"buffer_count": 4} if on_nvme else {})},
            "reduce_bucket_size": shape.hidden * shape.hidden,
            "stage3_prefetch_bucket_size": int(0.9 * shape.hidden * shape.hidden),
            "stage3_param_persistence_threshold": 10 * shape.hidden,
            "stage3_max_live_parameters": int(2.3 * shape.num_layer_params),
            "stage3_max_reuse_distance": 0,
            # Number of elements whose optimizer states are swapped together.
            "sub_group_size": shape.num_layer_params,
        },
        "aio": {"block_size": MIB, "queue_depth": 32, "intra_op_parallelism": 2, "overlap_events": True},
    }


def main(folder: Path, device: str, ssd_dir: Path, gpu_gib: float | None) -> None:
    """Trains with DeepSpeed, or reports what is missing."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    if gpu_gib is None:
        os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    try:
        import deepspeed
    except ImportError as error:
        emit("missing", reason=f"DeepSpeed cannot be imported ({error}); install the extra `bench`")
        return
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    workload = read_workload(folder)
    torch.set_num_threads(workload.num_threads)
    if gpu_gib is not None:
        total_nbytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, gpu_gib * 2**30 / total_nbytes))
    model = load_model(folder, use_reentrant=True)
    optimizer = DeepSpeedCPUAdam(
        decay_groups(list(model.parameters()), workload.weight_decay),
        lr=workload.learning_rate,
        betas=(workload.beta1, workload.beta2),
        eps=workload.epsilon,
        adamw_mode=True,
    )
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=deepspeed_config(workload, device, ssd_dir, on_gpu=gpu_gib is not None),
    )

    def train_step(inputs: torch.Tensor, targets: torch.Tensor) -> float:
        losses = []
        num = workload.num_microbatches
        for part, its_targets in zip(inputs.chunk(num), targets.chunk(num), strict=True):
            loss = mean_loss(engine, part.to(engine.device), its_targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return statistics.fmean(map(float, losses))  # read at the end, because the host waits for the device there

    run_steps(workload, folder, train_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), float(sys.argv[4]) if len(sys.argv) > 4 else None)
