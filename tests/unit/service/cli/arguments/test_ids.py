"""Ids on the command line: misspelt, of another kind, or cut short."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from windlass.service.cli import data as cli_data
from windlass.service.cli import jobs as cli_jobs
from windlass.service.cli.arguments import ids as cli_ids
from windlass.service.cli.errors import CommandError
from windlass.service.installation.client import RequestRefusedError, ServiceClient
from windlass.service.jobs.machine_resources import MachineResources

Command = Callable[..., Any]
COMMANDS = [cli_jobs.show, cli_jobs.logs, cli_jobs.cancel, cli_jobs.pause, cli_jobs.resume, cli_jobs.checkpoints]


@pytest.fixture
def service(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> ServiceClient:
    """The client that all commands use."""
    service = ServiceClient(str(client.base_url))
    service._http = client
    for module in (cli_ids, cli_jobs, cli_data):
        monkeypatch.setattr(module, "open_client", lambda _settings: nullcontext(service))
    return service


@pytest.fixture
def job_id(service: ServiceClient, file_id: str) -> str:
    found: str = service.create_job({"model": "tiny", "training_file": file_id})["id"]
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_command_job_id_misspelt_is_refused_with_the_nearest(tmp_path: Path, job_id: str, command: Command) -> None:
    digits = job_id.removeprefix("ftjob-")
    for typed in (job_id[:12], digits, f"ftjb-{digits}", f"{job_id}0", job_id.upper()):
        with pytest.raises(CommandError) as caught:
            command(typed, home=tmp_path)
        assert str(caught.value) == f"there is no fine-tuning job {typed!r}; did you mean {job_id}?"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("file-1", "'file-1' is the id of a file, not of a job (ftjob-…); `windlass jobs` lists jobs"),
        ("ft:tiny::1", "'ft:tiny::1' is the id of a model, not of a job (ftjob-…); `windlass jobs` lists jobs"),
        ("", "'' is not the id of a job (ftjob-…); `windlass jobs` lists jobs"),
        ("../files", "'../files' is not the id of a job (ftjob-…); `windlass jobs` lists jobs"),
    ],
)
def test_command_something_else_than_a_job_id_is_refused_before_a_request(
    tmp_path: Path, command: Command, typed: str, words: str
) -> None:
    with pytest.raises(CommandError) as caught:
        command(typed, home=tmp_path)
    assert str(caught.value) == words


def test_command_job_id_without_anything_near_says_how_to_list_jobs(tmp_path: Path, service: ServiceClient) -> None:
    with pytest.raises(
        CommandError, match="there is no fine-tuning job 'ftjob-1'; `windlass jobs` lists what there is"
    ):
        cli_jobs.show("ftjob-1", home=tmp_path)


def test_delete_misspelt_ids_are_refused_with_the_nearest(tmp_path: Path, job_id: str, file_id: str) -> None:
    for typed, meant in ((job_id[:-1], job_id), (file_id[:-1], file_id)):
        with pytest.raises(CommandError, match=f"; did you mean {meant}\\?"):
            cli_data.delete([typed], yes=True, home=tmp_path)


def test_other_refusals_stay_as_they_are(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(RequestRefusedError, match="was expected to be paused") as caught:
        cli_jobs.resume(job_id, home=tmp_path)
    assert caught.value.code == "invalid_state"


def test_submit_file_that_is_not_there_is_refused_with_the_one_beside_it(
    tmp_path: Path, service: ServiceClient
) -> None:
    (tmp_path / "train.jsonl").touch()
    for typed, words in (
        ("train.josnl", f"there is no file {tmp_path}/train.josnl; did you mean {tmp_path}/train.jsonl?"),
        ("other.jsonl", "the path of a .jsonl file, or the id of an uploaded one (file-…)"),
        ("gone/x.jsonl", "the path of a .jsonl file, or the id of an uploaded one (file-…)"),
        ("", f"{tmp_path} is a folder; give the path"),
    ):
        with pytest.raises(CommandError) as caught:
            cli_jobs.submit("tiny", str(tmp_path / typed), home=tmp_path)
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "begin", "end"),
    [
        ("a.jsonl", '{"text": "a"}\n{', "file: {path}, line 2: not valid JSON", "column 2"),
        (
            "my chats.jsonl",
            '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}',
            "file: {path}, line 1: expected",
            "}' '{path}' > converted.jsonl",
        ),
        ("a.json", '[{"text": "a.json is"}]', "file: the name must end in .jsonl, got '{path}'", " {path} > {out}"),
        ("a.csv", "question,answer\na,b\n", "file: the name must end in .jsonl, got '{path}'", " {path} | jq -c "),
        ("a.jsonl", "", "file: '{path}' is empty", ""),
    ],
)
def test_submit_tells_of_a_refused_file_as_its_sender_named_it(
    tmp_path: Path, service: ServiceClient, name: str, content: str, begin: str, end: str
) -> None:
    path = tmp_path / "chats of may" / name if " " in name else tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    with pytest.raises(RequestRefusedError) as caught:
        cli_jobs.submit("tiny", str(path), home=tmp_path)
    told = str(caught.value)
    assert told.startswith(begin.replace("{path}", str(path)))
    assert end.replace("{path}", str(path)).replace("{out}", "converted.jsonl") in told
    assert '"text": "a.json is"' in told or name != "a.json"


def test_jobs_of_one_suffix_are_told_apart_in_the_list(
    tmp_path: Path, service: ServiceClient, file_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    request = {"model": "tiny", "training_file": file_id, "suffix": "support"}
    ids = [service.create_job(request)["id"] for _ in range(2)]
    cli_jobs.jobs(home=tmp_path)
    header, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert header[:3] == ["job", "suffix", "status"]
    assert [line[:3] for line in lines] == [[each, "support", "validating_files"] for each in reversed(ids)]
    cli_jobs.show(ids[0], home=tmp_path)
    told = capsys.readouterr().out
    assert "suffix           support\n" in told
    assert "GPUs" not in told


def test_show_tells_the_number_of_gpus_if_there_are_several(
    tmp_path: Path,
    service: ServiceClient,
    file_id: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MachineResources, "here", lambda _: MachineResources(num_cores=4, num_gpus=4))
    job = service.create_job({"model": "tiny", "training_file": file_id, "windlass": {"gpus": 3}})
    cli_jobs.show(job["id"], home=tmp_path)
    assert re.search(r"^GPUs +3$", capsys.readouterr().out, re.MULTILINE)
