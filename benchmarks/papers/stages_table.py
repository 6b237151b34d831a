"""Tables of `benchmarks.papers`: Ratel's stages, and the amounts that it swaps."""

from benchmarks.papers.published.models import RATEL_SHAPES
from benchmarks.papers.published.stages import (
    FIGURE_9B_BATCHES,
    NUM_EXAMPLES,
    NUM_TOKENS,
    PUBLISHED_STAGES,
    RATEL_SWAPPED_NBYTES,
    computed_stages,
    one_by_one_gb_per_s,
    ratel_profile,
    ratel_server,
    statements,
    with_host_memory,
    with_ssd_rate,
)
from benchmarks.reporting.page import Page, compared
from windlass.amounts import GIB
from windlass.planner.baselines import POLICIES, Rest, stage_times
from windlass.planner.baselines.ratel_swap import Case
from windlass.planner.baselines.system_stages import Swapped, best_amount, resting_nbytes
from windlass.planner.hardware import Hardware, example_machines, load
from windlass.planner.profiling import config_of_shape
from windlass.planner.profiling.model_profiler import profile_config
from windlass.planner.simulation import simulate_policy
from windlass.storage.ids import Precision

_STAGES = ("forward", "backward", "optimizer")
_IN_WORDS = {Case.LEAST: "rises", Case.BETWEEN: "falls, then rises", Case.ALL: "falls"}
_SSD_RATES = (32, 30, 28, 26, 24)  # GB/s


def add_stages(page: Page) -> float:
    """Adds the stage times of three systems. Returns the largest error."""
    server = ratel_server()
    page.add(
        "## Times of three systems on one server",
        f"Ratel's RTX 4090 server with twelve SSDs, its 13B model, batch {NUM_EXAMPLES} x {NUM_TOKENS} tokens (its "
        "figure 1, tables III and IV). The paper measured ZeRO-Infinity and Ratel, and simulated G10. One set of rates "
        "serves all three. None was fitted to the stages; the last two are readings of statements that leave others "
        "open, and what they are worth is told below:",
    )
    page.add_table(
        ("rate", "value", "from"),
        [
            ("PCIe", f"{server.pcie.h2d_gb_per_s:g} GB/s each way, both at once", "figure 1"),
            ("SSDs", f"{server.ssds.combined_gb_per_s:g} GB/s together, one way at a time", "figure 1"),
            ("GPU", f"{server.gpus.tflops:.1f} TFLOPS", "III-C: the forward pass computes for 5.96 s"),
            (
                "Adam on the CPU",
                f"{server.host.adam_params_per_s / 1e9:.2f} billion parameters a second",
                "IV-D: takes less than the 28 bytes a parameter on the SSDs; the slowest that does",
            ),
            (
                "params read one by one",
                f"{one_by_one_gb_per_s():.1f} GB/s",
                "III-B: ZeRO-Infinity's SSDs are busy for 6.25 s in backward; taken to be its params, 2 bytes each",
            ),
        ],
    )
    rows, errors = [], []
    for published in PUBLISHED_STAGES:
        times = computed_stages(published.system, swapped_nbytes=published.swapped_nbytes)
        for stage, seconds, found_s in zip(_STAGES, published.seconds, times.seconds, strict=True):
            if seconds:
                rows.append((published.system, stage, *compared(seconds, found_s, 1)))
                errors.append(abs(found_s / seconds - 1))
        rows.append((published.system, "all", *compared(sum(published.seconds), times.iteration_s, 1)))
    page.add_table(("system", "stage", "published, s", "computed, s", "ratio"), rows)
    page.add("Whole steps, simulated block by block with the same rates, as `windlass plan --compare` does:")
    page.add_table(("system", "published, s", "simulated, s", "ratio"), _simulated_steps())
    ratel = computed_stages("Ratel", swapped_nbytes=RATEL_SWAPPED_NBYTES)
    full_rate = _infinity_at_full_rate()
    page.add(
        "ZeRO-Infinity and G10 are within 15 percent. For Ratel its 34 GiB are swapped. Its stages are as computed "
        "only "
        "if they are read with the paper's other figures ([below](#what-papers-reach-and-what-windlass-plans)): "
        "forward, "
        "the published 5 s are less than the 5.96 s that the same paper gives for the compute alone; backward, the GPU "
        f"is busy for {ratel.backward.gpu_s:.1f} s, the SSDs for {ratel.backward.ssd_s:.1f} s and Adam for "
        f"{ratel.backward.cpu_s:.1f} s, and nothing that equation 5 knows takes longer. Read the computed times of "
        "systems that overlap as what is left when nothing waits. Simulated, where blocks wait for each other, Ratel's "
        "whole step comes within 15 percent of the published one, and G10's, which Ratel's authors computed, is "
        "longer.",
        f"What the last two rates are worth: with the shipped profile's Adam, {_shipped_adam() / 1e9:.0f} billion "
        f"parameters a second, ZeRO-Infinity's optimizer stage would take {_infinity_with_shipped_adam():.1f} s, not "
        f"{full_rate[2]:.1f} s; with params read as fast as all SSDs can, its forward and backward passes "
        f"{full_rate[0]:.1f} and {full_rate[1]:.1f} s. Only ZeRO-Infinity, which overlaps nothing, reads params one by "
        "one.",
    )
    return max(errors)


def add_statements(page: Page) -> None:
    """Adds the figures in the text of the paper."""
    page.add("What else Ratel's text says of these runs (its GB of activations are GiB, by the shape):")
    page.add_table(
        ("what", "section", "published", "computed", "ratio"),
        [(each.what, each.where, *compared(each.published, each.computed)) for each in statements()],
    )


def add_amounts(page: Page) -> None:
    """Adds the amounts that Algorithm 1 chooses."""
    profile, policy = ratel_profile(), POLICIES["Ratel"]
    rows = []
    for gb_per_s in _SSD_RATES:
        server = with_ssd_rate(ratel_server(), gb_per_s)
        in_host = best_amount(policy, server, profile)
        on_ssds = best_amount(policy, with_host_memory(server, 1), profile)
        rows.append(
            (
                str(gb_per_s),
                *(
                    cell
                    for each in (in_host, on_ssds)
                    for cell in (f"{each.nbytes / GIB:.0f}", f"{each.iteration_s:.1f}")
                ),
            )
        )
    page.add(
        "## How much Ratel swaps",
        "Its Algorithm 1, computed over the SSDs' rate, with host memory for all activations and with none (then they "
        "go on to the SSDs). Published: about 34 GB on a server whose 768 GB would hold them all.",
    )
    page.add_table(
        ("SSDs, GB/s", "into host memory, GiB", "step, s", "onto SSDs, GiB", "step, s"),
        rows,
    )
    at_published = computed_stages("Ratel", swapped_nbytes=RATEL_SWAPPED_NBYTES).iteration_s
    rows = []
    for batch_size in FIGURE_9B_BATCHES:
        amounts = [
            best_amount(policy, with_host_memory(with_ssd_rate(ratel_server(), gb_per_s), 1), ratel_profile(batch_size))
            for gb_per_s in (26, 32)
        ]
        published = "rises" if batch_size == FIGURE_9B_BATCHES[0] else "falls, then rises"
        rows.append(
            (str(batch_size), published, *(f"{_IN_WORDS[each.case]}: {each.nbytes / GIB:.0f}" for each in amounts))
        )
    page.add(
        "With 32 GB/s it swaps more than was published: into host memory until PCIe is as busy as the forward pass, "
        f"onto SSDs until they are as busy as the backward pass. A step with 34 GiB would take {at_published:.1f} s. "
        "The published amount is what it chooses at 26 GB/s with activations on the SSDs. Two more figures agree with "
        f"that rate: G10's optimizer stage (2 x 182 GB in {364 / 26:.0f} s; published 13), and how a step's time goes "
        "with the swapped amount (figure 9b). So reads and writes in turn probably reach 26 to 28 GB/s there, not 32.",
    )
    page.add_table(("batch", "step's time, published", "26 GB/s, GiB chosen", "32 GB/s, GiB chosen"), rows)


def add_systems(page: Page) -> None:
    """Adds all policies on the same server and model."""
    server, profile = ratel_server(), ratel_profile()
    rows = []
    for system, policy in POLICIES.items():
        times = stage_times(policy, server, profile, one_by_one_gb_per_s=one_by_one_gb_per_s())
        on_gpu = resting_nbytes(policy, profile, Rest.GPU)
        chosen = "" if policy.swapped in (Swapped.INTERBLOCK, Swapped.ALL) else ", chosen"
        rows.append(
            (
                system,
                *(f"{seconds:.1f}" for seconds in times.seconds),
                f"{times.iteration_s:.1f}",
                f"{times.gpu_share:.2f}",
                f"{times.swapped_nbytes / GIB:.0f}{chosen}",
                f"{on_gpu / GIB:.0f}{' (does not fit)' if on_gpu > server.gpus.memory_gib * GIB else ''}",
                f"{resting_nbytes(policy, profile, Rest.HOST) / GIB:.0f}",
            )
        )
    page.add(
        "## All systems, computed",
        "The same model and server. What a system keeps where, whether it updates during the backward pass and whether "
        "transfers overlap the compute is all that sets them apart. GPU: 24 GiB.",
    )
    page.add_table(
        (
            "system",
            *(f"{stage}, s" for stage in _STAGES),
            "step, s",
            "GPU busy",
            "swapped, GiB",
            "states on GPU, GiB",
            "in host memory, GiB",
        ),
        rows,
    )
    page.add(
        "Capuchin and Checkmate are as Ratel's authors built them for comparison, with states on the SSDs: they swap "
        "to host memory only and choose the amount as if no states moved. With these rates that is the same amount. "
        "ZeRO-Offload's params would fill the GPU; as it trained this model there, not all of them were on it."
    )


def add_own_profile(page: Page) -> None:
    """Adds the formulas beside the operators that windlass would run."""
    config = config_of_shape(RATEL_SHAPES[13], num_tokens=NUM_TOKENS)
    own = profile_config(config, Precision.BF16, num_examples=NUM_EXAMPLES, num_tokens=NUM_TOKENS)
    profile = ratel_profile()
    page.add(
        "The formulas beside windlass's own profile, which goes through the operators of Hugging Face's GPT-2 (without "
        "dropout, whose masks the formulas count, on a CPU):"
    )
    page.add_table(
        ("13B", "by formula", "by operators"),
        [
            ("parameters, billions", f"{profile.numel / 1e9:.4f}", f"{own.numel / 1e9:.4f}"),
            ("operations of a forward pass, 10^12", f"{profile.num_flops / 1e12:.2f}", f"{own.num_flops / 1e12:.2f}"),
            (
                "activations between layers, GiB",
                f"{profile.interblock_nbytes / GIB:.1f}",
                f"{own.interblock_nbytes / GIB:.1f}",
            ),
            ("all activations, GiB", f"{profile.activation_nbytes / GIB:.1f}", f"{own.activation_nbytes / GIB:.1f}"),
        ],
    )


def _shipped_adam() -> float:
    return load(Hardware, example_machines()["rtx4090-server"]).host.adam_params_per_s


def _simulated_steps() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for published in PUBLISHED_STAGES:
        step = simulate_policy(
            POLICIES[published.system],
            ratel_server(),
            ratel_profile(),
            one_by_one_gb_per_s=one_by_one_gb_per_s(),
            swapped_nbytes=published.swapped_nbytes,
        )
        rows.append((published.system, *compared(sum(published.seconds), step.step_s, 1)))
    return rows


def _infinity_with_shipped_adam() -> float:
    server = ratel_server()
    fast = server.model_copy(update={"host": server.host.model_copy(update={"adam_params_per_s": _shipped_adam()})})
    return stage_times(POLICIES["ZeRO-Infinity"], fast, ratel_profile()).seconds[2]


def _infinity_at_full_rate() -> tuple[float, float, float]:
    return stage_times(POLICIES["ZeRO-Infinity"], ratel_server(), ratel_profile()).seconds
