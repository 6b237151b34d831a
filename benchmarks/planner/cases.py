"""The jobs of `benchmarks.planner`: different shapes, tiers and budgets, with and without clipping."""

from benchmarks.planner.case import Case

CASES = (
    Case(title="all on the device", hidden=512, num_layers=16, batch_size=8, sequence_length=256),
    Case(
        title="deep and narrow, clipping", hidden=384, num_layers=32, batch_size=8, sequence_length=256, clip_norm=1.0
    ),
    Case(title="wide", hidden=1280, num_layers=6, batch_size=4, sequence_length=256),
    Case(title="little device memory", hidden=768, num_layers=12, batch_size=4, sequence_length=256, device_mib=500),
    Case(title="little memory: SSDs", hidden=1024, num_layers=10, batch_size=4, sequence_length=256, memory_mib=1100),
    Case(
        title="little memory, clipping",
        hidden=768,
        num_layers=16,
        batch_size=4,
        sequence_length=256,
        memory_mib=1100,
        clip_norm=1.0,
    ),
    Case(title="micro-batches", hidden=640, num_layers=16, batch_size=16, sequence_length=128, num_microbatches=4),
    Case(
        title="micro-batches, little memory",
        hidden=896,
        num_layers=10,
        batch_size=8,
        sequence_length=256,
        num_microbatches=2,
        memory_mib=1300,
    ),
    Case(title="long sequences", hidden=512, num_layers=12, batch_size=2, sequence_length=1024, device_mib=700),
    Case(title="layers in pieces", hidden=1536, num_layers=4, batch_size=2, sequence_length=256, device_mib=230),
    Case(
        title="in groups, clipping",
        hidden=256,
        num_layers=12,
        batch_size=8,
        sequence_length=1024,
        num_microbatches=8,
        device_mib=500,
        clip_norm=1.0,
    ),
    Case(
        title="all activations swapped",
        hidden=512,
        num_layers=10,
        batch_size=8,
        sequence_length=256,
        device_mib=400,
        num_swapped=99,
    ),
    Case(
        title="some outputs swapped, clipping",
        hidden=896,
        num_layers=8,
        batch_size=4,
        sequence_length=384,
        device_mib=500,
        num_swapped=4,
        clip_norm=1.0,
    ),
)
QUICK_CASES = (Case(title="small", hidden=128, num_layers=4, batch_size=2, sequence_length=64),)
