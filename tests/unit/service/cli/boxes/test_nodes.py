"""The commands of a box that leaves."""

import io
import sys
from contextlib import closing
from pathlib import Path

import pytest
import typer

from windlass.service.cli.boxes.nodes import leave
from windlass.service.cluster.box.connection import BoxFiles, Membership, keep_membership, membership_of
from windlass.service.cluster.box.join import check_home
from windlass.service.installation.home import node_of
from windlass.service.installation.settings import Settings
from windlass.service.validation.reported_error import ReportedError
from windlass.storage.sql.database import Database, migrate
from windlass.storage.sql.repositories.boxes.parts import PartRepository, PartState


def test_box_with_a_damaged_key_leaves_with_forget_and_can_join_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_membership(tmp_path, Membership(head="https://127.0.0.1:1", box_id="box-1", name="attic"))
    files = BoxFiles(tmp_path)
    files.key.parent.mkdir()
    for path in (files.key, files.certificate, files.authority):
        path.write_text("damaged")
    with pytest.raises(ReportedError, match="windlass node leave --forget"):
        leave(yes=True, forget=False, home=tmp_path)
    assert membership_of(tmp_path) is not None
    leave(yes=True, forget=True, home=tmp_path)
    assert "run `windlass node remove attic` on the head" in capsys.readouterr().out
    assert not files.key.exists()
    check_home(tmp_path)


def test_box_that_leaves_is_told_of_the_states_that_it_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_membership(tmp_path, Membership(head="https://127.0.0.1:1", box_id="box-1", name="attic"))
    monkeypatch.setenv("WINDLASS_HOME", str(tmp_path))
    settings = Settings(home=tmp_path)
    migrate(settings.database_url)
    with closing(Database(settings.database_url)) as database, database.write() as session:
        parts, node = PartRepository(session), node_of(tmp_path)
        for job_id, served in (("ftjob-1", 3), ("ftjob-2", 0)):
            parts.add(job_id, node, position=1, state=PartState.READY)
            session.flush()
            parts.tell(job_id, node, state=PartState.READY, served=served, told=None)
    monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
    with pytest.raises(typer.Abort):
        leave(yes=False, forget=False, home=tmp_path)
    told = capsys.readouterr().out
    assert "over several boxes, with states here: job ftjob-1. These states will be removed" in told
    assert membership_of(tmp_path) is not None
