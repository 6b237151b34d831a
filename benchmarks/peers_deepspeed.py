"""The peer that offloads: DeepSpeed ZeRO-3. `python -m benchmarks.peers_deepspeed FOLDER cpu|nvme SSD_DIR`

Sizes follow the values that Hugging Face's integration calls "auto"; where DeepSpeed's defaults are made for much larger
models (buffers of 10^8 elements, reduction buckets of 5 * 10^8) they are cut to what these models need, in its favour.
"""

import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.peer import decay_groups, emit, load_model, next_token_loss, run_steps
from benchmarks.workload import ModelShape, Workload, read_workload

MIB = 1 << 20


def deepspeed_config(workload: Workload, device: str, ssd_dir: Path) -> dict[str, Any]:
    """ZeRO-3 with params and optimizer states on `device`: "cpu" or "nvme"."""
    shape = workload.shape
    offload_param: dict[str, Any] = {"device": device}
    offload_optimizer: dict[str, Any] = {"device": device}
    if device == "nvme":
        offload_param |= {
            "nvme_path": str(ssd_dir),
            "buffer_count": 16,  # a layer has 12 tensors, nine of them too small to be swapped
            "buffer_size": max(shape.vocab, shape.intermediate, shape.hidden) * shape.hidden,
            "max_in_cpu": 0,
        }
        offload_optimizer |= {
            "nvme_path": str(ssd_dir),
            "buffer_count": 4,
            "pipeline_read": True,
            "pipeline_write": True,
        }
    return {
        "train_micro_batch_size_per_gpu": workload.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": offload_param,
            "offload_optimizer": offload_optimizer,
            "reduce_bucket_size": shape.hidden * shape.hidden,
            "stage3_prefetch_bucket_size": int(0.9 * shape.hidden * shape.hidden),
            "stage3_param_persistence_threshold": 10 * shape.hidden,
            "sub_group_size": sub_group_numel(shape),
        },
        "aio": {"block_size": MIB, "queue_depth": 32, "thread_count": 2, "overlap_events": True},
    }


def sub_group_numel(shape: ModelShape) -> int:
    """Elements whose optimizer states are swapped together: about a layer."""
    return 4 * shape.hidden * shape.hidden + 3 * shape.hidden * shape.intermediate


def main(folder: Path, device: str, ssd_dir: Path) -> None:
    """Train with DeepSpeed, or report what is missing."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    try:
        import deepspeed
    except ImportError as error:
        emit("missing", reason=f"deepspeed is not installed ({error}); pip install 'windlass[bench]'")
        return
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    workload = read_workload(folder)
    torch.set_num_threads(workload.num_threads)
    model = load_model(folder, use_reentrant=True)
    optimizer = DeepSpeedCPUAdam(
        decay_groups(list(model.parameters()), workload.weight_decay),
        lr=workload.learning_rate,
        betas=(workload.beta1, workload.beta2),
        eps=workload.epsilon,
        adamw_mode=True,
    )
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(workload, device, ssd_dir)
    )

    def train_step(ids: torch.Tensor) -> float:
        loss = next_token_loss(engine, ids)
        engine.backward(loss)
        engine.step()
        return loss.item()

    run_steps(workload, folder, train_step)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
