"""Prints the README's table of model sizes, from plans for a box that does not have to exist.

Run `python docs/examples/plan_table.py`. It takes minutes. Nothing is measured: the table is the same on every machine.
"""

from dataclasses import replace

from windlass.engine.training_config import TrainingConfig
from windlass.planner.feasibility import fits, with_part
from windlass.planner.hardware import Hardware, ModelShape
from windlass.planner.planning.planner import fastest_plan
from windlass.planner.profiling import config_of_shape
from windlass.planner.question import PlanQuestion, Profiles

# The same numbers as in docs/hardware.md, with larger SSDs and Ratel's rate of the link.
BOX = Hardware.model_validate(
    {
        "gpus": {"count": 1, "memory_gib": 24, "tflops": 150, "name": "NVIDIA GeForce RTX 4090"},
        "host": {"memory_gib": 56, "memory_gb_per_s": 60, "adam_params_per_s": 2.0e9},
        "pcie": {"h2d_gb_per_s": 21, "d2h_gb_per_s": 21},
        "ssds": {
            "count": 1,
            "read_gb_per_s": 6.5,
            "write_gb_per_s": 4.0,
            "capacity_gib": 3576,
            "combined_gb_per_s": 16,
        },
    }
)
# The sizes of Qwen2.5: layers, hidden size, heads, key-value heads, size of the MLP.
SHAPES = {
    "7.6B": (28, 3584, 28, 4, 18944),
    "14.8B": (48, 5120, 40, 8, 13824),
    "32.8B": (64, 5120, 40, 8, 27648),
    "72.7B": (80, 8192, 64, 8, 29568),
}
VOCAB_SIZE = 152064
RAM_GIB = (64, 128, 256)
SYSTEM_RAM_GIB = 8  # of the RAM, not for jobs
NUM_SSDS = (1, 2, 4)
BATCH_SIZE, SEQUENCE_LENGTH = 16, 2048
NUM_STEPS = 1000


def main() -> None:
    """Prints a Markdown table, one line for each model and RAM size."""
    print("| model | RAM |", *(f"{num_ssds} SSD |" for num_ssds in NUM_SSDS))
    print("|---|---|", *("---|" for _ in NUM_SSDS), sep="")
    for name, (num_layers, hidden_size, num_heads, num_kv_heads, intermediate_size) in SHAPES.items():
        shape = ModelShape(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            intermediate_size=intermediate_size,
            vocab_size=VOCAB_SIZE,
        )
        config = config_of_shape(shape, num_tokens=SEQUENCE_LENGTH)
        training = TrainingConfig(batch_size=BATCH_SIZE, sequence_length=SEQUENCE_LENGTH, total_steps=NUM_STEPS)
        question = PlanQuestion(
            config=config, hardware=BOX, training=training, chooses_microbatches=True, chooses_cut=True
        )
        profiles = Profiles(question)
        for ram_gib in RAM_GIB:
            cells = [_hours(question, profiles, ram_gib=ram_gib, num_ssds=num_ssds) for num_ssds in NUM_SSDS]
            print(f"| {name} | {ram_gib} GiB |", *(f"{cell} |" for cell in cells), flush=True)


def _hours(question: PlanQuestion, profiles: Profiles, *, ram_gib: int, num_ssds: int) -> str:
    host = with_part(BOX.host, memory_gib=float(ram_gib - SYSTEM_RAM_GIB))
    box = with_part(BOX, host=host, ssds=with_part(BOX.ssds, count=num_ssds))
    question = replace(question, hardware=box)
    if not fits(question, profiles):
        return "no plan fits"
    _, _, step_s = fastest_plan(question, profiles)
    return f"{step_s * NUM_STEPS / 3600:.3g} h"


if __name__ == "__main__":
    main()
