"""Machines by name: published ones and desktops in several sizes."""

import pytest

from windlass.planner.hardware.hardware import Gpus, Hardware, example_machines, unusual
from windlass.planner.hardware.named_machines import (
    UnknownMachineError,
    desktops,
    endurance_tbw_of,
    limit_in_words,
    machine_name,
    machine_names,
    machine_of,
    with_faster_card,
    with_more_ram,
    with_more_ssds,
    with_one_more_gpu,
)
from windlass.planner.hardware.yaml_files import load

# Bytes that an update reads and writes for a parameter with fp32 states.
UPDATE_NBYTES = 28
NAMES = [
    f"{card}:gpus={gpus},ram={ram},ssds={ssds}"
    for card, about in desktops().cards.items()
    for gpus in desktops().sizes(about)["gpus"]
    for ram in desktops().sizes(about)["ram"]
    for ssds in desktops().sizes(about)["ssds"]
]


def test_every_desktop_is_a_usual_machine() -> None:
    assert len(NAMES) == 108
    for name in NAMES:
        machine = machine_of(name)
        assert unusual(machine) == [], name
        assert machine.host.adam_params_per_s * UPDATE_NBYTES <= machine.host.memory_gb_per_s * 1e9, name
        assert load(Hardware, example_machines()["rtx4090-server"]) != machine


def test_every_named_machine_leaves_memory_to_the_system() -> None:
    """A measured machine's profile has what is free, so these have not all of their memory, either."""
    tera = 931
    installed = {"rtx4090-server": 768, "a100-40g-server": tera, "memascend-1": tera, "memascend-2": tera}
    assert installed.keys() == example_machines().keys()
    installed |= {f"rtx3090:ram={ram}": ram for ram in (64, 128, 256)}
    assert {name: machine_of(name).host.memory_gib + 4 for name in installed} == installed


def test_a_name_says_the_sizes_in_any_order() -> None:
    machine = machine_of("rtx3090:ssds=4,ram=256,gpus=2")
    assert (machine.gpus.count, machine.gpus.memory_gib, machine.host.memory_gib, machine.ssds.count) == (2, 24, 252, 4)
    assert machine == machine_of("rtx3090:gpus=2,ram=256,ssds=4")


@pytest.mark.parametrize(
    ("written", "listed"),
    [
        ("RTX4090", "rtx4090"),
        ("rtx 4090", "rtx4090"),
        ("RTX-4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("GeForce RTX 3090:gpus=2", "rtx3090:gpus=2"),
        ("Rtx_5090 : RAM = 128, SSDs = 2", "rtx5090:ram=128,ssds=2"),
        ("rtx4090:ram=96GB", "rtx4090:ram=96"),
        ("rtx4090:RAM=96 GiB,ssd=2", "rtx4090:ram=96,ssds=2"),
        ("2x RTX 4090", "rtx4090:gpus=2"),
        ("2 × RTX-4090:ram=96", "rtx4090:gpus=2,ram=96"),
        ("rtx 4090 x2", "rtx4090:gpus=2"),
        ("RTX4090X2:ssds=2", "rtx4090:gpus=2,ssds=2"),
        ("RTX4090 Server", "rtx4090-server"),
        ("A100_40G_SERVER", "a100-40g-server"),
    ],
)
def test_a_name_may_be_written_in_several_ways(written: str, listed: str) -> None:
    assert machine_name(written) == listed
    assert machine_of(written) == machine_of(listed)


def test_names_of_lists_are_written_as_they_are() -> None:
    names = [*NAMES, *machine_names()]
    assert [machine_name(name) for name in names] == names


@pytest.mark.parametrize(("ram", "listed"), [(16, 64), (96, 128), (129, 256), (192, 256)])
def test_a_size_of_ram_that_is_not_listed_changes_memory_only(ram: int, listed: int) -> None:
    """Its rates are those of the next larger size, because a board runs so much memory as fast."""
    machine, larger = (machine_of(f"rtx4090:ssds=2,ram={gib}") for gib in (ram, listed))
    assert machine.host.memory_gib == ram - 4
    assert machine.model_copy(update={"host": larger.host}) == larger
    assert machine.host == larger.host.model_copy(update={"memory_gib": ram - 4})


def test_more_ram_of_a_desktop_has_the_rates_of_that_size() -> None:
    for ram, more in ((64, 128), (96, 160), (128, 192)):
        assert with_more_ram(machine_of(f"rtx5090:ram={ram}"), 64) == machine_of(f"rtx5090:ram={more}")


@pytest.mark.parametrize("name", ["rtx5090:ram=256", "memascend-2"])
def test_more_ram_of_another_machine_is_as_fast_as_what_is_there(name: str) -> None:
    machine = machine_of(name)
    more = with_more_ram(machine, 64).host
    assert more == machine.host.model_copy(update={"memory_gib": machine.host.memory_gib + 64})


def test_endurance_is_known_of_a_desktops_ssds_only() -> None:
    assert endurance_tbw_of(machine_of("rtx3090:ssds=3").ssds) == 1200
    assert endurance_tbw_of(machine_of("rtx4090-server").ssds) is None


def test_a_size_that_is_left_out_is_the_smallest() -> None:
    assert machine_of("rtx5090") == machine_of("rtx5090:gpus=1,ram=64,ssds=1")
    assert machine_of("rtx5090:ssds=2") == machine_of("rtx5090:gpus=1,ram=64,ssds=2")


def test_gpus_of_one_board_share_its_lanes() -> None:
    one, two, four = (machine_of(f"rtx4090:gpus={count}").pcie.h2d_gb_per_s for count in (1, 2, 4))
    assert one >= 2 * two >= 4 * four


def test_a_published_machine_is_its_file() -> None:
    assert machine_of("memascend-1") == load(Hardware, example_machines()["memascend-1"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rtx4080", "no machine is named rtx4080; did you mean rtx4090"),
        ("nothing", "no machine is named nothing; there are desktops with rtx3090, rtx4090, rtx5090, in sizes as"),
        ("a100", "no machine is named a100; did you mean a100-40g-server? There are desktops with"),
        ("RTX 4080", "no machine is named RTX 4080; did you mean rtx4090"),
        ("4090", "no machine is named 4090; did you mean rtx4090"),
        ("rtx4090:", "nothing follows the colon; write rtx4090:gpus=4,ram=256,ssds=4"),
        ("rtx4090:ram", "'ram' is not one of gpus=…, ram=…, ssds=…"),
        ("rtx4090:ram=128,", "'' is not one of"),
        ("rtx4090:cpus=2", "'cpus=2' is not one of"),
        ("rtx4090:ram=128,ram=64", "ram is given twice"),
        ("rtx4090:ram=15", "ram=15 is not possible; ram may be a whole number of GiB from 16 to 256"),
        ("rtx4090:ram=257", "ram=257 is not possible; ram may be a whole number of GiB from 16 to 256"),
        ("rtx4090:ram=1TB", "ram=1tb is not possible; ram may be a whole number of GiB"),
        ("rtx4090:ram=64.5", "ram=64.5 is not possible; ram may be a whole"),
        ("rtx4090:ram=" + "9" * 5000, "ram may be a whole"),
        ("RTX 4090:RAM=128,ram=64", "ram is given twice"),
        ("rtx4090:gpus=3", "gpus=3 is not possible; gpus may be 1, 2, 4"),
        ("3x rtx4090", "gpus=3 is not possible; gpus may be 1, 2, 4"),
        ("2x rtx4090:gpus=2", "gpus is given twice"),
        ("2x RTX 4080", "no machine is named 2x RTX 4080; did you mean rtx4090"),
        ("2x rtx4090-server", "rtx4090-server has one size"),
        ("rtx 90", "no machine is named rtx 90"),
        ("rtx5090 ram=96", "sizes follow a colon, as in rtx5090:gpus=4,ram=256,ssds=4"),
        ("rtx4090-server:ssds=2", "rtx4090-server has one size"),
        ("RTX4090 Server:ssds=2", "rtx4090-server has one size"),
    ],
)
def test_a_wrong_name_says_what_there_is(name: str, words: str) -> None:
    with pytest.raises(UnknownMachineError) as caught:
        machine_of(name)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_faster_card_is_the_next_one_or_twice_as_fast() -> None:
    measured = Gpus(count=2, memory_gib=23.5, tflops=75, name="NVIDIA GeForce RTX 4090")
    faster = with_faster_card(measured)
    assert (faster.name, faster.memory_gib, faster.tflops, faster.count) == ("NVIDIA GeForce RTX 5090", 32, 100, 2)
    for name in ("NVIDIA GeForce RTX 5090", "NVIDIA H100 PCIe", None):
        gpus = Gpus(count=1, memory_gib=80, tflops=600, name=name)
        assert with_faster_card(gpus) == Gpus(count=1, memory_gib=80, tflops=1200)


def test_one_more_part_of_a_desktop_is_its_next_size() -> None:
    machine = machine_of("rtx5090:ram=128,ssds=3")
    assert with_more_ssds(machine, 1) == machine_of("rtx5090:ram=128,ssds=4")
    assert with_one_more_gpu(machine) == machine_of("rtx5090:gpus=2,ram=128,ssds=3")
    assert with_one_more_gpu(machine_of("rtx5090:gpus=2,ram=128,ssds=3")) == machine_of("rtx5090:gpus=4,ram=128,ssds=3")
    assert with_one_more_gpu(machine_of("rtx5090:gpus=4,ram=128,ssds=3")) is None


def test_one_more_part_of_another_machine_is_like_the_others() -> None:
    machine = machine_of("rtx4090-server")
    assert with_one_more_gpu(machine).pcie == machine.pcie
    assert with_one_more_gpu(machine).gpus.count == 2
    # 32 GB/s together are far below what the SSDs could do, so something else limits them.
    more = with_more_ssds(machine, 12).ssds
    assert more == machine.ssds.model_copy(update={"count": 24})
    assert limit_in_words(machine.ssds, more) == " (together at most 32 GB/s, as now)"
    own = machine.ssds.model_copy(update={"count": 2, "read_gb_per_s": 7.0, "combined_gb_per_s": 13.0})
    more = with_more_ssds(machine.model_copy(update={"ssds": own}), 1).ssds
    assert (more.count, more.combined_gb_per_s) == (3, 19.5)
    assert limit_in_words(own, more) == ""
    # A single SSD shares its limit with none.
    one = own.model_copy(update={"count": 1, "combined_gb_per_s": 4.0})
    assert with_more_ssds(machine.model_copy(update={"ssds": one}), 1).ssds.combined_gb_per_s == 8.0
