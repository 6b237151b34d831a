"""Commands for the service as a whole: up, down, status, doctor.

Each command imports only the modules that it needs. Most commands only call the API and must start fast.
"""

import json
import logging
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from windlass.service.cli.boxes import unit_of
from windlass.service.cli.errors import CommandError, OptionError
from windlass.service.cli.table import print_columns
from windlass.service.cluster.box import Membership, membership_of
from windlass.service.installation import (
    HARDWARE_FILE,
    KEY_VARIABLE,
    SETTINGS_FILE,
    Drive,
    Serving,
    Settings,
    box_of,
    find_killed,
    find_serving,
    inspect_machine,
    load_settings,
    open_client,
    prepare_home,
    told_killed,
    told_new_ssd_dirs,
    write_setting,
)
from windlass.service.machine import RayCluster
from windlass.service.processes import start_detached
from windlass.service.validation import ReportedError, told_jobs
from windlass.storage.ids import Precision
from windlass.storage.ssd import is_device_path

_GIB = 1024**3
_MAX_PORT = 65535

Home = Annotated[Path | None, typer.Option(help="The home directory; else WINDLASS_HOME, else ~/.windlass.")]


def up(
    detach: Annotated[
        bool, typer.Option("--detach", help="Run in the background, and return once it answers.")
    ] = False,
    port: Annotated[int | None, typer.Option(help="The port of the API and the dashboard.")] = None,
    cluster_host: Annotated[
        str | None,
        typer.Option(
            help="An IP address of this machine at which other boxes reach it. It is written into windlass.toml of the "
            "home, for later starts."
        ),
    ] = None,
    cluster_port: Annotated[
        int | None, typer.Option(help="The port that boxes call; it is written there, too.")
    ] = None,
    print_unit: Annotated[
        bool, typer.Option("--print-unit", help="Print a systemd user unit for this home, and start nothing.")
    ] = False,
    measure: Annotated[
        bool | None,
        typer.Option(
            help="Measure the machine if it was not measured or has changed (default: the setting `measure`)."
        ),
    ] = None,
    home: Home = None,
) -> None:
    """Start the service. It continues the jobs of a service that was killed."""
    # An environment variable overrides the settings file, and the started processes inherit it.
    for option, number in (("port", port), ("cluster_port", cluster_port)):
        if number is not None:
            if not 1 <= number <= _MAX_PORT:  # else the error would name the variable
                raise OptionError(f"--{option.replace('_', '-')}: must be from 1 to {_MAX_PORT}, got {number}")
            os.environ[f"WINDLASS_{option.upper()}"] = str(number)
    if cluster_host is not None:
        os.environ["WINDLASS_CLUSTER_HOST"] = cluster_host
    # only for requests of the command line; the service's processes and jobs must not see it
    os.environ.pop(KEY_VARIABLE, None)
    settings = load_settings(home)
    membership = membership_of(settings.home)
    if membership is not None and settings.cluster_host is not None:
        raise CommandError(
            f"{settings.home} is a box of {membership.head} and cannot be a head; leave cluster_host out"
        )
    if settings.cluster_host is not None:
        from windlass.service.cluster.authority import check_cluster_host

        check_cluster_host(settings.cluster_host)
    if print_unit:
        print(unit_of(settings.home, cluster_host=cluster_host, cluster_port=cluster_port, port=port), end="")
        return
    if cluster_host is not None or cluster_port is not None:
        _keep_cluster_address(settings, host=cluster_host, port=cluster_port)
    for line in told_new_ssd_dirs(settings.ssd_dirs, settings.home):
        print(line, flush=True)
    measures = (settings.measure if measure is None else measure) and find_serving(settings.home) is None
    if measures or settings.is_for_others:  # checks for a key before the measurement, which takes minutes
        from windlass.service.auth import migrate_database, prepare_database

        prepare_database(settings) if membership is None else migrate_database(settings)
    if measures:
        from windlass.service.processes import ensure_measured

        ensure_measured(settings, lambda line: print(line, flush=True))
    if detach:
        serving = start_detached(settings)
        if membership is not None:
            told = f"works as box {membership.name} for {membership.head}"
            print(f"windlass {told} (process {serving.process.pid}); end it with `windlass down`")
            return
        print(f"windlass is up at {serving.url} (process {serving.process.pid}); end it with `windlass down`")
        return
    from windlass.service.processes import Supervisor

    os.environ["WINDLASS_HOME"] = str(settings.home)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    Supervisor(settings).run()
    _leave_ray_to_jobs(settings)


def _keep_cluster_address(settings: Settings, *, host: str | None, port: int | None) -> None:
    """Keeps the options in the home's settings: started without them, the head would be away for all its boxes.

    Raises PortInUseError if the address is not this machine's.
    """
    from windlass.service.processes import listening

    if host is not None:
        with listening(host, 0, setting="cluster_port"):
            pass  # before the machine is measured
    command = "windlass up"
    try:
        prepare_home(settings.home)
        for name, value in (("cluster_port", port), ("cluster_host", host)):
            if value is None:
                continue
            own = write_setting(settings.home, name, json.dumps(value), command=command)
            if own not in (None, value):
                file = settings.home / SETTINGS_FILE
                print(f"! {file} says {name} = {own}: the next start goes by that, this one by the option", flush=True)
    except OSError as error:
        told = f"{settings.home / SETTINGS_FILE} cannot be written ({error.strerror})"
        print(f"! {told}; give --cluster-host at each start, or boxes do not find this head", flush=True)


def down(
    force: Annotated[bool, typer.Option("--force", help="Also end running jobs: they fail.")] = False,
    home: Home = None,
) -> None:
    """End the service, its Ray daemon, and with --force its running jobs."""
    from windlass.service.processes import shut_down

    settings = load_settings(home)
    ended = shut_down(settings, force=force)
    if ended.supervisor is not None:
        box, process = box_of(settings.home), f"(process {ended.supervisor.process.pid})"
        if box is None:
            print(f"ended the service at {ended.supervisor.url} {process}")
        else:
            print(f"ended box {box.name}, which worked for the service at {box.head} {process}")
    if ended.num_ray_processes:
        print(f"ended Ray ({ended.num_ray_processes} processes)")
    for job_id in ended.failed_jobs:
        print(f"job {job_id} has failed: it was running")
    if ended.supervisor is None and not ended.num_ray_processes:
        print("windlass is not running; there was nothing to end")


def status(home: Home = None) -> None:
    """Show whether the service runs, and the state of its jobs. Exit code 1 if it does not run."""
    settings = load_settings(home)
    serving = find_serving(settings.home)
    cluster = RayCluster(settings.home)
    ray_pids = cluster.pids
    ray = f"running ({len(ray_pids)} processes)" if ray_pids else "not running"
    if ray_pids and not cluster.is_running:
        ray = f"broken ({len(ray_pids)} of its processes are left)"
    if serving is None:
        killed = find_killed(settings.home)
        if killed is None:
            print(f"windlass is not running in {settings.home}; start it with `windlass up --detach`")
        elif (box := box_of(settings.home)) is not None:
            print(
                f"windlass is not running: box {box.name} of {box.head} was killed or crashed (process "
                f"{killed.process.pid}); start it with `windlass up --detach`"
            )
        else:
            print(f"windlass is not running: nothing answers at {killed.url}, {told_killed(settings, killed)}")
        if cluster.is_running:
            print(f"Ray is {ray}: jobs go on, and `windlass up` takes them up again")
        raise typer.Exit(1)
    if (membership := membership_of(settings.home)) is not None:
        _print_box_status(settings, membership, serving, ray)
        return
    with open_client(settings) as client:
        healthy = client.is_healthy()
        found = client.jobs() if healthy else []
    print(f"windlass is {'up' if healthy else 'starting, or does not answer,'} at {serving.url}")
    print(f"home  {settings.home}\npid   {serving.process.pid}\nRay   {ray}")
    counts = Counter(job["status"] for job in found)
    print(f"jobs  {', '.join(f'{count} {name}' for name, count in sorted(counts.items())) or 'none'}")
    for job in found:
        if reason := job["windlass"]["waiting_reason"]:
            name = f"{job['suffix']}, " if job["suffix"] else ""
            print(f"! {job['id']} ({name}{job['status']}): {reason}")


def _print_box_status(settings: Settings, membership: Membership, serving: Serving, ray: str) -> None:
    """Shows the state of a box that has joined a head. Its jobs are shown by the head."""
    from windlass.service.cluster.box import HeadConnection
    from windlass.service.processes import running_jobs

    try:
        with HeadConnection.of_box(settings.home) as connection:
            known = connection.get("/v1/node/self").json()
        head = f"answers; this box is {known['state']} there"
    except ReportedError as error:
        head = f"! {error}"
    print(f"windlass works as box {membership.name} for {membership.head}")
    print(f"head  {head}\nhome  {settings.home}\npid   {serving.process.pid}\nRay   {ray}")
    running = running_jobs(settings)
    print(f"jobs  {f'{len(running)} running: {told_jobs(running)}' if running else 'none running'}")


def doctor(
    home: Home = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure nothing.")] = False,
    save: Annotated[Path | None, typer.Option(help="The file of the hardware profile (default: in the home).")] = None,
    precision: Annotated[Precision, typer.Option(help="Precision in which the device is measured.")] = (Precision.BF16),
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="On a head: measure the network between all boxes, and nothing else. Some seconds for each pair.",
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="With --network: also boxes on which jobs run, which makes these slower.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --network: print one JSON object.")] = False,
) -> None:
    """Show this machine's resources, and measure its device, link, memory, optimizer and SSDs."""
    from windlass.service.machine import check_limits, check_ports

    settings = load_settings(home)
    if network:
        from windlass.service.cli.boxes import check_network

        if not check_network(settings, forced=force, as_json=as_json):
            raise typer.Exit(1)
        return
    for option, is_given in (("--force", force), ("--json", as_json)):
        if is_given:
            raise OptionError(f"{option} goes with --network; add that, or leave it out")
    directories = [path for path in settings.ssd_dirs if not is_device_path(path)]
    devices = tuple(path for path in settings.ssd_dirs if is_device_path(path))
    machine = inspect_machine((Path("/dev/shm"), settings.home, *directories), devices)
    rows = [
        ("cores", str(machine.num_cores)),
        ("memory", _of(machine.available_memory_nbytes, machine.memory_nbytes)),
        *((str(space.path), _of(space.free_nbytes, space.total_nbytes)) for space in machine.spaces),
        *((str(drive.path), _describe_drive(drive)) for drive in machine.drives),
        *(
            ("GPU", f"{gpu.name}, {gpu.memory_nbytes / _GIB:.1f} GiB, driver {gpu.driver_version}")
            for gpu in machine.gpus
        ),
    ]
    if not machine.gpus:
        counted = "" if settings.cpu_ranks == 1 else f", which counts as {settings.cpu_ranks} devices"
        rows.append(("GPU", f"none that may be used; jobs train on the CPU{counted}"))
    findings = [*check_limits(machine), *check_ports(settings)]
    print_columns([*rows, *((finding.what, finding.found) for finding in findings)])
    for finding in findings:
        if finding.remedy:
            print(f"! {finding.what}: {finding.remedy}")
    if not quick:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        _measure(settings, save or settings.home / HARDWARE_FILE, precision)


def _measure(settings: Settings, path: Path, precision: Precision) -> None:
    from windlass.planner.hardware import unusual
    from windlass.service.processes import measure_and_save

    hardware = measure_and_save(settings, path, lambda line: print(line, flush=True), precision=precision)
    print_columns(
        [
            (f"{group}.{name}", value)
            for group, part in hardware.model_dump(exclude_none=True).items()
            for name, value in part.items()
        ]
    )
    for warning in unusual(hardware):
        print(f"! {warning}")
    print(f"saved as {path}")


def _describe_drive(drive: Drive) -> str:
    if drive.nbytes is None:
        return "there is no such block device"
    size = f"block device of {drive.nbytes / _GIB:.1f} GiB"
    return size if drive.may_be_used else f"{size}, which you may not read and write; group disk may, as a rule"


def _of(free_nbytes: int, total_nbytes: int) -> str:
    return f"{free_nbytes / _GIB:.1f} of {total_nbytes / _GIB:.1f} GiB free"


def _leave_ray_to_jobs(settings: Settings) -> None:
    """Ends a service in the foreground. Ray keeps running if jobs train on it."""
    from windlass.service.processes import running_jobs

    if jobs := running_jobs(settings):
        print(
            f"training continues without the service: {told_jobs(jobs)}; `windlass up` attaches to it again, "
            "`windlass down --force` ends it"
        )
    else:
        RayCluster(settings.home).stop()
