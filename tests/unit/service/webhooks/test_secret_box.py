"""The key file in which sealed secrets can be opened again."""

from pathlib import Path

import pytest

from tests.support.power_cut import PowerCut
from windlass.service.webhooks.secret_box import SealError, SecretBox


def test_seal_power_loss_after_the_first_secret_leaves_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = PowerCut(tmp_path, monkeypatch)
    sealed = SecretBox(tmp_path).close("secret")
    (key_file,) = tmp_path.iterdir()
    assert cut.left()[key_file.name] == key_file.read_bytes()
    assert SecretBox(tmp_path).open(sealed) == "secret"


def test_seal_two_processes_that_make_the_key_at_once_have_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slower one checks before the faster one has made the file, and continues afterwards."""
    faster, slower = SecretBox(tmp_path), SecretBox(tmp_path)
    sealed = faster.close("secret")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)
        again = slower.close("another")
    assert (faster.open(again), slower.open(sealed)) == ("another", "secret")


def test_another_key_does_not_open_what_was_sealed(tmp_path: Path) -> None:
    key = tmp_path / "secrets.key"
    sealed = SecretBox(tmp_path).close("hush")
    assert SecretBox(tmp_path).open(sealed) == "hush"
    right = key.read_bytes()
    key.unlink()
    with pytest.raises(SealError, match="cannot be read: No such file"):
        SecretBox(tmp_path).open(sealed)
    SecretBox(tmp_path).close("another")
    with pytest.raises(SealError, match="not the one with which"):
        SecretBox(tmp_path).open(sealed)
    key.write_bytes(b"")
    for use in (SecretBox(tmp_path).open, SecretBox(tmp_path).close):
        with pytest.raises(SealError, match="holds no key"):
            use(sealed)
    key.write_bytes(right)
    assert SecretBox(tmp_path).open(sealed) == "hush"
