"""Compares the SSD server with fio and DeepSpeed's aio: `python -m benchmarks.ssd [--quick] [--directory DIR]`

Requests have 2 MiB to 1 GiB, several in flight. They read, write, or do both like an update (12 bytes a parameter in,
14 out). Windlass uses its SSD server actor with descriptors and checksums. Each peer uses the best of several settings,
found in advance. All run interleaved in rounds.

Further tables show the latency of one request with and without the actor, the cost of checksums, and one to four
servers on one disk.
"""

import statistics
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.reporting.machine import num_cores
from benchmarks.reporting.report import Report, parse_options, ratio, spread
from benchmarks.scratch_folder import scratch_folder
from benchmarks.ssd.contenders import ActorServer, LocalServer, Setup
from benchmarks.ssd.peers import DeepSpeedAio, Fio, PeerMissingError
from benchmarks.ssd.requests import Traffic, geometry_of
from windlass.actors.job import calibration_of
from windlass.service.jobs import ARENA_DIR
from windlass.service.machine import RayCluster
from windlass.storage.io import IoSettings
from windlass.storage.ssd import Calibration, Volume

MIB = 1 << 20
_LATENCY_NBYTES = 2 * MIB
_NUM_LATENCIES = 200


def in_flight_of(request_nbytes: int) -> int:
    """Returns the number of requests in flight: several, but few large ones, because each needs its size of memory."""
    return (
        16 if request_nbytes <= 2 * MIB else 8 if request_nbytes <= 16 * MIB else 4 if request_nbytes < 1 << 30 else 3
    )


@contextmanager
def ray_cluster(home: Path) -> Iterator[None]:
    """Runs a Ray daemon in the context."""
    cluster = RayCluster(home)
    try:
        cluster.ensure_running(num_cpus=num_cores(), num_gpus=0)
        cluster.connect()
        yield
    finally:
        import ray

        ray.shutdown()  # before the daemon ends: a driver without its daemon waits a minute for it
        cluster.stop()


def describe(calibration: Calibration) -> str:
    """Describes a calibration in one line."""
    io = calibration.io
    rates = (calibration.read_bytes_per_s, calibration.write_bytes_per_s, calibration.mixed_bytes_per_s)
    read, write, mixed = (f"{rate / 1e9:.1f}" for rate in rates)
    return (
        f"{io.backend}: {io.num_threads} x {io.depth} in flight, pieces of {io.piece_nbytes // MIB} MiB; "
        f"read {read}, write {write}, mixed {mixed} GB/s"
    )


def best_setting(measure: Callable[[Any], float], settings: Sequence[Any]) -> Any:
    """Returns the setting with the highest rate."""
    return max(settings, key=measure)


class Comparison:
    """All rates of one request size."""

    def __init__(self, request_nbytes: int, folder: Path, io: IoSettings, *, num_rounds: int, seconds: float) -> None:
        self.request_nbytes = request_nbytes
        self.rates: dict[tuple[Traffic, str], list[float]] = defaultdict(list)
        self.settings: dict[tuple[Traffic, str], Any] = {}
        self.missing: dict[str, str] = {}
        self._num_rounds = num_rounds
        self._seconds = seconds
        # Large enough that no chunk is in flight twice.
        self._working_set_nbytes = max(MIB << 10, in_flight_of(request_nbytes) * request_nbytes)
        geometry = geometry_of(request_nbytes, self._working_set_nbytes)
        self._setup = Setup(folder / "windlass", geometry, in_flight_of(request_nbytes), ARENA_DIR)
        self._io = io
        self._fio = self._peer(Fio.name, lambda: Fio(folder / "fio.bin", self._working_set_nbytes))
        self._aio = self._peer(
            DeepSpeedAio.name,
            lambda: DeepSpeedAio(folder / "aio.bin", self._working_set_nbytes, in_flight_of(request_nbytes)),
        )

    def run(self) -> None:
        """Finds the peers' settings, and measures all contenders in alternating order."""
        server = ActorServer(self._setup, self._io)
        try:
            for traffic in Traffic:
                self._tune(traffic)
                contenders: list[tuple[str, Callable[[], float]]] = [
                    ("windlass", lambda traffic=traffic: server.measure(traffic, self._seconds))  # type: ignore[misc]
                ]
                if self._fio is not None:
                    contenders.append((Fio.name, lambda traffic=traffic: self._fio_rate(traffic)))  # type: ignore[misc]
                if self._aio is not None:
                    contenders.append((DeepSpeedAio.name, lambda traffic=traffic: self._aio_rate(traffic)))  # type: ignore[misc]
                for turn in range(self._num_rounds):
                    for name, measure in contenders if turn % 2 == 0 else reversed(contenders):
                        self.rates[(traffic, name)].append(measure())
                if self._aio is not None:
                    self._aio.release()
        finally:
            server.close()

    def over_best_peer(self, traffic: Traffic) -> float | None:
        """Returns windlass's median rate divided by the better peer's; None without peers."""
        peers = [statistics.median(self.rates[(traffic, name)]) for name in self.peers if self.rates[(traffic, name)]]
        return ratio(statistics.median(self.rates[(traffic, "windlass")]), max(peers, default=None))

    @property
    def peers(self) -> list[str]:
        """The names of the peers that can run."""
        return [name for name in (Fio.name, DeepSpeedAio.name) if name not in self.missing]

    def close(self) -> None:
        """Releases memory and disk space."""
        self._setup.close()
        for peer in (self._fio, self._aio):
            if peer is not None:
                peer.close()

    def _peer(self, name: str, make: Callable[[], Any]) -> Any:
        try:
            return make()
        except PeerMissingError as error:
            self.missing[name] = str(error)
            return None

    def _tune(self, traffic: Traffic) -> None:
        seconds = self._seconds / 4
        if self._fio is not None:
            settings = self._fio.settings(self.request_nbytes)
            self.settings[(traffic, Fio.name)] = best_setting(
                lambda setting: self._fio.measure(traffic, seconds, setting), settings
            )
        if self._aio is not None:
            settings = self._aio.settings(self.request_nbytes)
            self.settings[(traffic, DeepSpeedAio.name)] = best_setting(
                lambda setting: self._aio.measure(traffic, seconds, setting, self.request_nbytes), settings
            )

    def _fio_rate(self, traffic: Traffic) -> float:
        rate: float = self._fio.measure(traffic, self._seconds, self.settings[(traffic, Fio.name)])
        return rate

    def _aio_rate(self, traffic: Traffic) -> float:
        setting = self.settings[(traffic, DeepSpeedAio.name)]
        rate: float = self._aio.measure(traffic, self._seconds, setting, self.request_nbytes)
        return rate


def rates_table(report: Report, comparisons: Sequence[Comparison]) -> None:
    """Adds a table with a row for each traffic and size."""
    names = ("windlass", Fio.name, DeepSpeedAio.name)
    rows = []
    for traffic in Traffic:
        for each in comparisons:
            rates = [spread(each.rates[(traffic, name)], scale=1e9) for name in names]
            best = " / ".join(str(each.settings.get((traffic, name), "missing")) for name in names[1:])
            size = f"{each.request_nbytes // MIB} MiB x {in_flight_of(each.request_nbytes)}"
            over = each.over_best_peer(traffic)
            rows.append([traffic, size, *rates, "missing" if over is None else f"{over:.2f}", best])
    header = ("traffic", "request x in flight", *(f"{name}, GB/s" for name in names), "over best", "peers' settings")
    report.add_table(header, rows)


def latency_table(report: Report, folder: Path, io: IoSettings) -> None:
    """Adds the latency of single 2 MiB reads."""
    # The master is 4 of a parameter's 14 bytes.
    geometry = geometry_of(_LATENCY_NBYTES * 14 // 4, 256 * MIB)
    nbytes = geometry.region_nbytes(geometry.kinds[1])
    setup = Setup(folder / "latency", geometry, 2, ARENA_DIR)
    rows = []
    try:
        for title, make in (
            ("SSD server, through the actor", lambda: ActorServer(setup, io)),
            ("SSD server, same process", lambda: prepared(LocalServer(setup, io))),
        ):
            server = make()
            times = [server.latency_s(nbytes) for _ in range(_NUM_LATENCIES)]
            server.close()
            rows.append([title, spread(times, scale=1e-6, digits=0)])
    finally:
        setup.close()
    for name, peer in (
        (Fio.name, lambda: Fio(folder / "fio.bin", 256 * MIB)),
        (DeepSpeedAio.name, lambda: DeepSpeedAio(folder / "aio.bin", 256 * MIB, 1)),
    ):
        try:
            made = peer()
        except PeerMissingError:
            continue
        rows.append([name, f"{made.latency_s(_LATENCY_NBYTES) * 1e6:.0f}"])
        made.close()
    report.add(f"Latency of one read of {nbytes / MIB:.2f} MiB, nothing else in flight:")
    report.add_table(("", "us: median (min to max)"), rows)


def checksum_cost(report: Report, folder: Path, io: IoSettings, *, num_rounds: int, seconds: float) -> float:
    """Returns the largest share of the rate that checksums cost, over the three kinds of traffic."""
    geometry = geometry_of(64 * MIB, 1 << 30)
    with_checksums = Setup(folder / "checksums", geometry, 4, ARENA_DIR)
    without = Setup(folder / "no-checksums", geometry, 4, ARENA_DIR, arena=with_checksums.arena)
    setups = {True: with_checksums, False: without}
    servers = {on: prepared(LocalServer(setup, io, checksums=on)) for on, setup in setups.items()}
    rates: dict[tuple[Traffic, bool], list[float]] = defaultdict(list)
    for turn in range(2 * num_rounds):
        for traffic in Traffic:
            for on in (True, False) if turn % 2 == 0 else (False, True):
                rates[(traffic, on)].append(servers[on].measure(traffic, seconds))
    for server in servers.values():
        server.close()
    without.close()
    with_checksums.close()
    costs = {
        traffic: 1 - statistics.median(rates[(traffic, True)]) / statistics.median(rates[(traffic, False)])
        for traffic in Traffic
    }
    rows = [
        [traffic, *(spread(rates[(traffic, on)], scale=1e9) for on in (True, False)), f"{costs[traffic]:.3f}"]
        for traffic in Traffic
    ]
    report.add("Checksums on and off, requests of 64 MiB, in one process:")
    report.add_table(("traffic", "on, GB/s", "off, GB/s", "cost"), rows)
    return max(costs.values())


def huge_pages_table(report: Report, folder: Path, io: IoSettings, *, num_rounds: int, seconds: float) -> None:
    """Adds the rates with an arena of huge pages, as in jobs, and with one of small pages."""
    geometry = geometry_of(64 * MIB, 512 * MIB)
    setups = {huge: Setup(folder / f"huge-{huge}", geometry, 4, ARENA_DIR, huge_pages=huge) for huge in (True, False)}
    servers = {huge: prepared(LocalServer(setup, io)) for huge, setup in setups.items()}
    rates: dict[tuple[Traffic, bool], list[float]] = defaultdict(list)
    for turn in range(num_rounds):
        for traffic in Traffic:
            for huge in (True, False) if turn % 2 == 0 else (False, True):
                rates[(traffic, huge)].append(servers[huge].measure(traffic, seconds))
    for huge, server in servers.items():
        server.close()
        setups[huge].close()
    rows = [[traffic, *(spread(rates[(traffic, huge)], scale=1e9) for huge in (True, False))] for traffic in Traffic]
    report.add("The arena in huge pages (the default where the kernel can) and in small ones, requests of 64 MiB:")
    report.add_table(("traffic", "huge pages, GB/s", "small pages, GB/s"), rows)


def many_servers(report: Report, folder: Path, io: IoSettings, *, num_rounds: int, seconds: float) -> None:
    """Adds the rates of several servers on one disk, each with its own directory.

    The disk's rate should stay the same.
    """
    geometry = geometry_of(64 * MIB, 512 * MIB)
    setups = [Setup(folder / f"server-{i}", geometry, 4, ARENA_DIR) for i in range(4)]
    servers = [prepared(LocalServer(setup, io)) for setup in setups]
    rates: dict[int, list[float]] = defaultdict(list)
    for _ in range(num_rounds):
        for count in range(1, 5):
            rates[count].append(sum(together([server.measure for server in servers[:count]], seconds)))
    for server, setup in zip(servers, setups, strict=True):
        server.close()
        setup.close()
    report.add("Servers on one disk, the update's mix, 64 MiB requests, 4 in flight each:")
    report.add_table(("servers", "GB/s together"), [[str(n), spread(rates[n], scale=1e9)] for n in sorted(rates)])


def together(measures: Sequence[Callable[[Traffic, float], float]], seconds: float) -> list[float]:
    """Returns the rates of several servers that work at the same time."""
    rates: list[float] = []
    threads = [
        threading.Thread(target=lambda measure=measure: rates.append(measure(Traffic.MIX, seconds)))
        for measure in measures
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rates


def prepared(server: LocalServer) -> LocalServer:
    """Writes the server's chunks, and returns the server."""
    server.requester.prepare()
    return server


def main() -> None:
    """Measures, reports, and prints the ratios as the last line."""
    options = parse_options("ssd", __doc__, quick="two sizes, one short round")
    sizes = [2 * MIB, 16 * MIB] if options.quick else [2 * MIB, 16 * MIB, 128 * MIB, 1024 * MIB]
    num_rounds, seconds = (1, 0.3) if options.quick else (5, 1.0)
    with scratch_folder(options.directory) as folder:
        (folder / "calibration").mkdir()
        volume = Volume.open(folder / "calibration")
        calibration = calibration_of(volume)
        volume.close()
        io = calibration.io
        configuration = {
            "form": "quick" if options.quick else "full",
            "rounds": num_rounds,
            "windlass's calibration": describe(calibration),
        }
        report = Report("SSD server", options.directory, configuration)
        comparisons = []
        (folder / "home").mkdir()
        with ray_cluster(folder / "home"):
            for size in sizes:
                print(f"measuring requests of {size // MIB} MiB ...", file=sys.stderr, flush=True)
                comparison = Comparison(size, folder, io, num_rounds=num_rounds, seconds=seconds)
                try:
                    comparison.run()
                finally:
                    comparison.close()
                comparisons.append(comparison)
            rates_table(report, comparisons)
            for peer, why in comparisons[0].missing.items():
                report.add(f"{peer}: {why}")
            latency_table(report, folder, io)
        cost = checksum_cost(report, folder, io, num_rounds=num_rounds, seconds=seconds)
        huge_pages_table(report, folder, io, num_rounds=num_rounds, seconds=seconds)
        many_servers(report, folder, io, num_rounds=num_rounds, seconds=seconds)
    ratios: dict[str, float | None] = {}
    for traffic in Traffic:
        over_peers = [each.over_best_peer(traffic) for each in comparisons]
        present = [each for each in over_peers if each is not None]
        ratios[f"{traffic}_over_best_peer_min"] = min(present) if len(present) == len(over_peers) else None
    report.finish({**ratios, "checksum_cost": cost})


if __name__ == "__main__":
    main()
