"""The command line's own parts: parsing of arguments and display of events."""

import contextlib
import io
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from fastapi.testclient import TestClient

from windlass.service.cli import follow as cli_follow
from windlass.service.cli import jobs as cli_jobs
from windlass.service.cli import service as cli_service
from windlass.service.cli.commands import main
from windlass.service.cli.data import delete, storage
from windlass.service.cli.errors import CommandError
from windlass.service.cli.follow import _loss, _time_left, format_event
from windlass.service.cli.jobs import _await_checks, _box_of, _finish, _parse_settings, export, pause, resume, submit
from windlass.service.cli.service import _describe_drive, doctor, status, up
from windlass.service.cli.table import print_columns
from windlass.service.installation.client import RequestRefusedError, ServiceClient
from windlass.service.installation.home import Serving
from windlass.service.installation.machine import Drive, told_new_ssd_dirs
from windlass.service.installation.process_ids import ProcessId
from windlass.service.installation.settings import Settings, load_settings
from windlass.service.processes.supervisor import PortInUseError


def test_settings_are_json_where_they_can_be() -> None:
    pairs = ["clip_norm=null", "weight_decay=0.1", "windlass.schedule=cosine", "windlass.budgets.host_memory_gib=4"]
    assert _parse_settings(pairs) == {
        "clip_norm": None,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "budgets": {"host_memory_gib": 4},
    }


def test_status_tells_what_jobs_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = Serving(process=ProcessId(pid=7, start="boot 1"), url="http://127.0.0.1:1")
    monkeypatch.setattr(cli_service, "find_serving", lambda _home: serving)
    monkeypatch.setattr(ServiceClient, "is_healthy", lambda _client: True)
    rows = [
        {"id": "ftjob-1", "suffix": None, "windlass": {"waiting_reason": "the disk of /ssd is full"}},
        {"id": "ftjob-2", "suffix": "support", "windlass": {"waiting_reason": "its turn"}},
        {"id": "ftjob-3", "suffix": "support", "windlass": {"waiting_reason": None}},
    ]
    jobs = [{**row, "status": "running"} for row in rows]
    monkeypatch.setattr(ServiceClient, "jobs", lambda _client: jobs)
    status(tmp_path)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "jobs  3 running",
        "! ftjob-1 (running): the disk of /ssd is full",
        "! ftjob-2 (support, running): its turn",
    ]


def test_options_of_submit_are_settings_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[dict[str, Any]] = []

    def create_job(client: ServiceClient, request: dict[str, Any]) -> dict[str, Any]:
        requests.append(request)
        return {"id": "ftjob-1"}

    monkeypatch.setattr(ServiceClient, "create_job", create_job)
    words = {"precision": "fp16", "optimizer": "adam", "state_precision": "fp32", "accumulation_precision": "fp16"}
    words["gradient_updates"] = "kept"
    submit(
        "tiny",
        "file-1",
        wait=False,
        home=tmp_path,
        max_bad_steps=0,
        gpus=2,
        box="attic",
        settings_=["beta2=0.95"],
        **words,
    )
    submit("tiny", "file-1", wait=False, home=tmp_path)
    for boxes in ("2", "head, attic"):
        submit("tiny", "file-1", wait=False, home=tmp_path, boxes=boxes)
    assert [request["windlass"] for request in requests] == [
        {**words, "max_bad_steps": 0, "gpus": 2, "box": "attic", "beta2": 0.95},
        {},
        {"boxes": 2},
        {"boxes": ["head", "attic"]},
    ]
    assert capsys.readouterr().out == "ftjob-1\n" * 4


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ("nowhere", "--boxes: nowhere is one box; name all, such as head,nowhere, or give --box nowhere"),
        ("-2", "--boxes: -2 is no number of boxes; give 2 or more, or names such as head,attic"),
        ("2.5", "--boxes: 2.5 is no number of boxes; give 2 or more, or names such as head,attic"),
        ("head,,attic", "--boxes: a name is empty in 'head,,attic'; give names such as head,attic"),
    ],
)
def test_wrong_boxes_are_refused_with_what_to_give(tmp_path: Path, boxes: str, why: str) -> None:
    with pytest.raises(CommandError, match=re.escape(why)):
        submit("tiny", "file-1", home=tmp_path, boxes=boxes)


def test_export_of_ill_formed_model_id_says_that_there_is_none(tmp_path: Path) -> None:
    (tmp_path / "fine-tuned" / "ft:tiny::ab12").mkdir(parents=True)
    (tmp_path / "fine-tuned" / "ft:tiny::ab12" / "config.json").write_text("{}")
    with pytest.raises(CommandError, match=r"there is no model 'ft:nope' in .*; `windlass models` lists"):
        export("ft:nope", tmp_path / "out", home=tmp_path)
    with pytest.raises(CommandError, match=r"there is no model 'ft:tiny:ab12' in .*; did you mean ft:tiny::ab12"):
        export("ft:tiny:ab12", tmp_path / "out", home=tmp_path)
    with pytest.raises(CommandError, match="never by a path; got '/tiny'"):
        export("/tiny", tmp_path / "out", home=tmp_path)


@pytest.mark.parametrize("port", [0, 80000])
def test_up_names_option_of_wrong_port(port: int, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=f"^--port: must be from 1 to 65535, got {port}$"):
        up(port=port, home=tmp_path)


def test_up_names_disk_of_ssd_directory_that_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, there = tmp_path / "home", tmp_path / "there"
    there.mkdir()
    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"{home}/ssd0,{there},/proc/windlass-test/states")
    (line,) = told_new_ssd_dirs(load_settings(home).ssd_dirs, home)
    assert line.startswith(
        "! ssd_dirs: /proc/windlass-test/states does not exist and will be made on the disk mounted at /proc; if"
    )


def test_pausing_and_resuming_say_what_becomes_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {"ftjob-1": "paused", "ftjob-2": "pausing"}
    monkeypatch.setattr(ServiceClient, "pause", lambda _client, job: {"status": answers[job]})
    asked = list[Any]()

    def resumed(_client: ServiceClient, job: str, *, gpus: Any, boxes: Any) -> dict[str, Any]:
        asked.append(boxes)
        return {"status": "queued"}

    monkeypatch.setattr(ServiceClient, "resume", resumed)
    pause("ftjob-1", home=tmp_path)
    pause("ftjob-2", home=tmp_path)
    resume("ftjob-1", home=tmp_path)
    for boxes in ("1", "head", "head,attic"):
        resume("ftjob-1", boxes=boxes, home=tmp_path)
    assert asked == [None, 1, ["head"], ["head", "attic"]]
    lines = ["job ftjob-1 is paused", "job ftjob-2 will pause after its step", *["job ftjob-1 is queued"] * 4]
    assert capsys.readouterr().out.splitlines() == lines


def test_the_client_pauses_and_resumes(client: TestClient, file_id: str) -> None:
    service = ServiceClient(str(client.base_url))
    service._http = client
    job_id = service.create_job({"model": "tiny", "training_file": file_id})["id"]
    assert service.pause(job_id)["status"] == "paused"
    assert service.resume(job_id)["status"] == "validating_files"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_service_says_which_setting_is_no_number(client: TestClient, file_id: str, value: float) -> None:
    service = ServiceClient(str(client.base_url))
    service._http = client
    request = {"model": "tiny", "training_file": file_id, "windlass": {"learning_rate": value}}
    with pytest.raises(RequestRefusedError, match=f"windlass.learning_rate: .* finite number, got {value}"):
        service.create_job(request)


@pytest.mark.parametrize("pair", ["seed", "=1", "a=1 a.b=2"])
def test_a_setting_without_key_or_value_is_refused(pair: str) -> None:
    with pytest.raises(CommandError, match="--set"):
        _parse_settings(pair.split())


def test_events_are_one_line_and_tell_what_is_not_well() -> None:
    event = {"created_at": 0, "level": "warn", "message": "2 examples were cut"}
    assert format_event(event).endswith(" warn: 2 examples were cut")
    assert format_event(event | {"level": "info"}).endswith(":00 2 examples were cut")


def test_the_bar_keeps_the_loss_beside_a_validation() -> None:
    loss = _loss({"train_loss": 2.5}, "")
    assert loss == "loss 2.5000"
    assert _loss({"valid_loss": 2.25}, loss) == "loss 2.5000, validation 2.2500"
    assert _loss({"train_loss": None}, loss) == loss


def test_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1000.0)
    measured, estimate = {"finish_is_estimate": False}, {"finish_is_estimate": True}
    assert _time_left({"estimated_finish": 1000 + 3600 + 61, "windlass": measured}) == "1:01:01 left"
    assert _time_left({"estimated_finish": 1000 + 3600 + 61, "windlass": estimate}) == "estimated: 1:01:01 left"
    assert _time_left({"estimated_finish": 990, "windlass": measured}) == "", "what has passed was wrong"
    assert _time_left({"estimated_finish": None, "windlass": {"finish_is_estimate": None}}) == ""


def test_finish_is_marked_until_it_is_measured() -> None:
    finishes = [
        _finish({"estimated_finish": 1e9, "windlass": {"finish_is_estimate": estimate}}) for estimate in (True, False)
    ]
    assert finishes[0] == f"{finishes[1]}, an estimate until enough steps are measured"
    assert _finish({"estimated_finish": None, "windlass": {"finish_is_estimate": None}}) is None


def test_columns_line_up_and_end_without_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    print_columns([("job", "step"), ("ftjob-1", 5), ("x", "")])
    assert capsys.readouterr().out == "job      step\nftjob-1  5\nx\n"


def test_the_doctor_tells_of_devices_and_of_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_SSD_DIRS", f"/dev/windlass-test-missing,{tmp_path}/ssd")
    doctor(tmp_path, quick=True)
    lines = {line.split(maxsplit=1)[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["/dev/windlass-test-missing"].endswith("  there is no such block device")
    assert lines[f"{tmp_path}/ssd"].endswith(" GiB free")


def test_a_drive_is_described_by_its_size_and_by_what_one_may() -> None:
    drive = {"path": Path("/dev/x"), "nbytes": 3 * 1024**3 // 2}
    assert _describe_drive(Drive(**drive, may_be_used=True)) == "block device of 1.5 GiB"
    assert "1.5 GiB, which you may not read and write" in _describe_drive(Drive(**drive, may_be_used=False))


# --- data ---


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Records the command line's requests to the service, which get no answer."""
    calls: list[tuple[object, ...]] = []

    def call(_client: ServiceClient, method: str, path: str, **more: Any) -> dict[str, Any]:
        calls.append((method, path, *more.values()))
        return {}

    monkeypatch.setattr(ServiceClient, "_call", call)
    return calls


def test_delete_chooses_the_object_by_its_id(
    tmp_path: Path, asked: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    delete(["ftjob-1", "file-1", "ft:tiny::1-step-2"], home=tmp_path)
    delete(["ftjob-2"], model=True, home=tmp_path)
    assert asked == [
        ("DELETE", "/v1/fine_tuning/jobs/ftjob-1", {"delete_model": False}),
        ("DELETE", "/v1/files/file-1"),
        ("DELETE", "/v1/models/ft:tiny::1-step-2"),
        ("DELETE", "/v1/fine_tuning/jobs/ftjob-2", {"delete_model": True}),
    ]
    assert capsys.readouterr().out.splitlines()[-1] == "ftjob-2 is deleted"


class Terminal(io.StringIO):
    """A terminal as standard input."""

    def isatty(self) -> bool:
        return True


def test_delete_with_an_invalid_id_deletes_nothing(tmp_path: Path, asked: list[tuple[object, ...]]) -> None:
    with pytest.raises(CommandError, match="'tiny' is not the id of a job"):
        delete(["ftjob-1", "tiny"], home=tmp_path)
    assert asked == []


@pytest.mark.parametrize(
    ("answer", "options", "is_deleted"), [("n", {}, False), ("y", {}, True), ("", {"yes": True}, True)]
)
def test_on_a_terminal_it_asks_first(
    tmp_path: Path,
    asked: list[tuple[object, ...]],
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    options: dict[str, bool],
    is_deleted: bool,
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(f"{answer}\n"))
    with contextlib.suppress(typer.Abort):
        delete(["ftjob-1"], home=tmp_path, **options)
    assert bool(asked) is is_deleted


def test_storage_is_a_table_with_totals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"kind": "base_model", "id": "tiny", "bytes": 5 * 1024**3}, {"kind": "job", "id": "ftjob-1", "bytes": 700}]
    totals = {"bytes": 1, "bytes_by_kind": {"job": 700, "base_model": 5 * 1024**3}, "free_bytes": 2048}
    monkeypatch.setattr(ServiceClient, "storage", lambda _client: {"data": rows, "windlass": totals})
    storage(limit=1, home=tmp_path)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        *("size kind what", "5.00 GiB base model tiny", "… and 1 more; --limit shows them", ""),
        *("all base model 5.00 GiB", "all job 700 bytes", "together 1 bytes", "free on the home's disk 2.00 KiB"),
    ]


def test_the_client_deletes_and_tells_what_is_occupied(client: TestClient, file_id: str) -> None:
    service = ServiceClient(str(client.base_url))
    service._http = client
    job_id = service.create_job({"model": "tiny", "training_file": file_id})["id"]
    with pytest.raises(RequestRefusedError, match="only finished jobs are deleted"):
        service.delete_job(job_id, with_model=False)
    service.cancel(job_id)
    assert service.job_storage(job_id)["bytes"] == 0
    service.delete_job(job_id, with_model=True)
    service.delete_file(file_id)
    assert (service.jobs(), service.files()) == ([], [])
    assert {row["kind"] for row in service.storage()["data"]} == {"base_model", "service"}
    with pytest.raises(RequestRefusedError, match="there is no model"):
        service.delete_model("ft:tiny::0123456789ab")


# --- submit waits for the checks ---


class _Watched:
    """A client whose job advances with each request."""

    def __init__(self, *looks: dict[str, Any]) -> None:
        self.looks = list(looks)

    def job(self, _job_id: str) -> dict[str, Any]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


def _validating(reason: str | None = None, summary: str | None = None) -> dict[str, Any]:
    preparation = None if summary is None else {"summary": summary, "percent": 3}
    return {"status": "validating_files", "windlass": {"waiting_reason": reason, "preparation": preparation}}


def test_submit_ends_well_once_the_files_were_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_follow, "_LOOK_S", 0.0)
    waiting = _validating("its turn to be prepared, after job ftjob-9")
    client = _Watched(waiting, waiting, _validating(summary="Reading the files"), {"status": "queued"})
    _await_checks(client, "ftjob-1")  # type: ignore[arg-type]
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("waiting for its turn to be prepared, after job ftjob-9") == 1


def test_submit_fails_with_what_the_checks_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_follow, "_LOOK_S", 0.0)
    client = _Watched(_validating(), {"status": "failed", "error": {"message": "mine.jsonl, line 7: no"}})
    with pytest.raises(CommandError, match=r"job ftjob-1 failed: mine\.jsonl, line 7: no"):
        _await_checks(client, "ftjob-1")  # type: ignore[arg-type]


def test_interrupted_submit_says_that_the_job_continues(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_jobs, "await_checks", interrupted)
    with pytest.raises(typer.Exit) as ended:
        _await_checks(_Watched(_validating()), "ftjob-1")  # type: ignore[arg-type]
    assert ended.value.exit_code == 130
    assert "the job goes on; `windlass show ftjob-1` tells how its checks end" in capsys.readouterr().err


def test_address_of_a_head_is_kept_for_later_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("CLUSTER_HOST", "CLUSTER_PORT"):
        monkeypatch.setenv(f"WINDLASS_{name}", "")  # `up` sets them, and they are reset after the test
    monkeypatch.setenv("WINDLASS_MEASURE", "0")
    started: list[tuple[str | None, int]] = []
    home, serving = tmp_path / "home", Serving(process=ProcessId(pid=7, start="boot 1"), url="http://127.0.0.1:1")

    def start(settings: Settings) -> Serving:
        started.append((settings.cluster_host, settings.cluster_port))
        for name in ("CLUSTER_HOST", "CLUSTER_PORT"):
            monkeypatch.setenv(f"WINDLASS_{name}", "")  # the next command is another process
        return serving

    monkeypatch.setattr(cli_service, "start_detached", start)
    up(detach=True, cluster_host="127.0.0.1", cluster_port=8650, home=home)
    up(detach=True, home=home)
    up(detach=True, cluster_host="127.0.0.2", home=home)
    (home / "windlass.toml").write_text(f"host_memory_gib = 2\n{(home / 'windlass.toml').read_text()}")
    up(detach=True, home=home)
    assert started == [("127.0.0.1", 8650), ("127.0.0.1", 8650), ("127.0.0.2", 8650), ("127.0.0.2", 8650)]
    assert (home / "windlass.toml").read_text().count("cluster_host") == 1
    with pytest.raises(PortInUseError, match=r"192\.0\.2\.1 is no address of this machine"):
        up(detach=True, cluster_host="192.0.2.1", home=home)
    monkeypatch.setenv("WINDLASS_CLUSTER_HOST", "")
    (home / "windlass.toml").write_text('cluster_host = "127.0.0.3"\n')
    up(detach=True, cluster_host="127.0.0.4", home=home)
    assert started[-1] == ("127.0.0.4", 8643)
    assert (home / "windlass.toml").read_text() == 'cluster_host = "127.0.0.3"\n', "its owner has written it"
    (told,) = (line for line in capsys.readouterr().out.splitlines() if "!" in line)
    assert "windlass.toml says cluster_host = 127.0.0.3: the next start goes by that" in told


def test_status_of_a_killed_box_names_the_box_and_not_the_port_of_its_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Serving(process=ProcessId(pid=7, start="boot 1"), url="https://10.0.0.1:8643")
    monkeypatch.setattr(cli_service, "find_killed", lambda _home: killed)
    (tmp_path / "box.json").write_text('{"name": "attic", "head": "https://10.0.0.1:8643", "box_id": "box-1"}')
    with pytest.raises(typer.Exit):
        status(tmp_path)
    assert capsys.readouterr().out == (
        "windlass is not running: box attic of https://10.0.0.1:8643 was killed or crashed (process 7); start it with "
        "`windlass up --detach`\n"
    )


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"box": "head", "attempt": 0, "settings": {"box": "attic"}}, "attic"),
        ({"box": "attic", "attempt": 1, "settings": {"box": "attic"}}, "attic"),
        ({"box": "head", "attempt": 0, "settings": {}}, "head"),
        ({"boxes": [], "attempt": 0, "settings": {"boxes": 2}}, "2 boxes"),
        ({"boxes": ["head", "attic"], "attempt": 0, "settings": {"boxes": 2}}, "head, attic"),
    ],
)
def test_job_is_listed_with_the_box_where_it_is_or_is_to_begin(values: dict[str, Any], name: str) -> None:
    assert _box_of({"windlass": values}) == name


@pytest.mark.parametrize(
    ("command", "option", "value", "told"),
    [
        ("plan", "--state-precision", "fp8", "'fp8' is not one of"),
        ("plan", "--lanes", "0", "greater than or equal to 1"),
        ("plan", "--batch-size", "x", "'--batch-size': must be a whole number\n"),
        ("plan", "--batch-size", "1.5", "'--batch-size': must be a whole number\n"),
        ("up", "--port", "x", "'--port': must be a whole number\n"),
        ("plan", "--slack", "x", "'--slack': must be a number\n"),
        ("plan", "--slack", "nan", "'--slack': must be a number\n"),
        ("plan", "--slack", "2", "less than or equal to 1"),
    ],
)
def test_option_of_a_wrong_kind_is_told_without_words_of_the_library(
    command: str,
    option: str,
    value: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["windlass", command, option, value])
    umask = os.umask(0o077)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        os.umask(umask)
    output = capsys.readouterr().err
    assert ended.value.code == 2
    assert told in output
    assert "Value error" not in output
    assert "Input should" not in output
