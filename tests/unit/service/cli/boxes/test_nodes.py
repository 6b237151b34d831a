"""The commands of a box that leaves."""

from pathlib import Path

import pytest

from windlass.service.cli.boxes.nodes import leave
from windlass.service.cluster.box.connection import BoxFiles, Membership, keep_membership, membership_of
from windlass.service.cluster.box.join import check_home
from windlass.service.validation.reported_error import ReportedError


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
