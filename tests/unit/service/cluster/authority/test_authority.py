"""The authority of a head, join codes and the wheel."""

import socket
import ssl
import stat
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from cryptography import x509

from windlass.service.cluster.authority import wheel
from windlass.service.cluster.authority.authority import (
    HEAD_SERVER_NAME,
    Authority,
    AuthorityError,
    check_cluster_host,
    make_box_request,
)
from windlass.service.cluster.authority.codes import CodeError, JoinCode, join_commands, new_join_code
from windlass.service.cluster.authority.wheel import digest_of_wheel, ensure_wheel
from windlass.service.data.backup import make_backup, restore_backup
from windlass.service.installation.settings import Settings, SettingsError
from windlass.storage.ids import BoxName
from windlass.storage.link import Certificates, Refused, server_name
from windlass.storage.link.wire import require_certificate_of
from windlass.storage.sql.database import Database, migrate


def test_authority_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    first, second = Authority.of(tmp_path), Authority.of(tmp_path)
    assert first.fingerprint == second.fingerprint
    key = tmp_path / "cluster" / "authority.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    key.chmod(0o640)
    with pytest.raises(AuthorityError, match="chmod 600"):
        Authority.of(tmp_path)


def test_server_certificate_is_kept_and_renewed_for_another_address(tmp_path: Path) -> None:
    authority = Authority.of(tmp_path)
    path, _ = authority.ensure_server_certificate("10.0.0.1")
    first = path.read_text()
    authority.ensure_server_certificate("10.0.0.1")
    assert path.read_text() == first
    authority.ensure_server_certificate("10.0.0.2")
    text = path.read_text()
    assert text != first
    certificate = x509.load_pem_x509_certificate(text[text.index("-----BEGIN CERT") :].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "10.0.0.2" in map(str, names.get_values_for_type(x509.IPAddress))


def test_server_certificate_is_renewed_before_it_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority.of(tmp_path)
    path, _ = authority.ensure_server_certificate("10.0.0.1")
    first = path.read_text()
    module = sys.modules[Authority.__module__]
    monkeypatch.setattr(module, "_RENEWED_BEFORE", 2 * module._SERVER_LASTS)
    authority.ensure_server_certificate("10.0.0.1")
    assert path.read_text() != first


def test_sign_box_text_that_is_no_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a certificate request"):
        Authority.of(tmp_path).sign_box("no request", "one")


def test_link_certificates_connect_boxes_and_no_head(tmp_path: Path) -> None:
    authority = Authority.of(tmp_path)
    (tmp_path / "authority.pem").write_text(authority.pem)
    certificates = {}
    for box in ("a", "b_2"):
        key, request = make_box_request()
        path = tmp_path / f"{box}.pem"
        path.write_bytes(key + authority.sign_link(request, BoxName(box)).encode())
        certificates[box] = Certificates(certificate=path, authority=tmp_path / "authority.pem")
    ends = socket.socketpair()
    with ends[0] as client, ends[1] as server:
        accepted: list[ssl.SSLSocket] = []
        context = certificates["b_2"].context(is_server=True)
        accept = threading.Thread(target=lambda: accepted.append(context.wrap_socket(server, server_side=True)))
        accept.start()
        name = server_name(BoxName("b_2"))
        connection = certificates["a"].context(is_server=False).wrap_socket(client, server_hostname=name)
        accept.join()
        require_certificate_of(accepted[0], "a")
        with pytest.raises(Refused):
            require_certificate_of(accepted[0], "c")
        connection.close()
        accepted[0].close()
    for path in (each.certificate for each in certificates.values()):
        certificate = x509.load_pem_x509_certificates(path.read_bytes())[0]
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert HEAD_SERVER_NAME not in names.get_values_for_type(x509.DNSName)


def test_backup_and_restore_keep_the_authority(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    settings.make_dirs()
    migrate(settings.database_url)
    before = Authority.of(settings.home)
    certificate, _ = before.sign_box(make_box_request()[1], "one")
    make_backup(settings, tmp_path / "backup")
    restore_backup(tmp_path / "backup", tmp_path / "restored")
    after = Authority.of(tmp_path / "restored")
    assert after.fingerprint == before.fingerprint
    x509.load_pem_x509_certificate(certificate.encode()).verify_directly_issued_by(after.certificate)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "box.example.org", "", "fe80::1%eth0"])
def test_cluster_host_that_names_no_single_address_is_refused(host: str) -> None:
    with pytest.raises(SettingsError, match="must be one IP address"):
        check_cluster_host(host)


def test_code_is_read_as_it_was_printed(tmp_path: Path) -> None:
    code = JoinCode(bytes(range(32)), bytes(range(32, 64)))
    assert JoinCode.parse(f" {code.text}\n") == code
    for wrong in ("", "wj_", code.text[3:], code.text[:-4]):
        with pytest.raises(CodeError, match="no join code"):
            JoinCode.parse(wrong)


def test_join_commands_have_the_digest_of_the_wheel_and_the_code(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, cluster_host="10.0.0.1")
    migrate(settings.database_url)
    database = Database(settings.database_url)
    with database.write() as session:
        code = new_join_code(settings, session)
    database.close()
    install, join = join_commands(settings, code)
    fetch, _, checked = install.partition(" && ")
    assert "https://10.0.0.1:8643/v1/node/wheel" in fetch
    path = ensure_wheel(tmp_path)
    assert f"  {path.name}' | sha256sum --check && python3 -m venv" in install
    assert f"./{path.name} 'torch==" in install
    assert f"--head 10.0.0.1:8643 --code {code}" in join
    (tmp_path / path.name).write_text("another wheel")
    subprocess.run(["bash", "-c", checked], cwd=tmp_path, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"})
    assert not (tmp_path / "windlass-venv").exists()


def test_wheel_can_be_installed_and_holds_the_package(tmp_path: Path) -> None:
    wheel = ensure_wheel(tmp_path)
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run([*command, "--disable-pip-version-check", "--no-compile"], check=True)
    assert (target / "windlass" / "storage" / "sql" / "migrations" / "versions").is_dir()
    assert (target / "windlass" / "web" / "templates" / "index.html").is_file()
    assert (target / "bin" / "windlass").is_file()
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None


def test_digest_of_a_wheel_is_computed_once_for_each_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(wheel, "hash_file", lambda path: read.append(path) or str(len(read)))
    path = tmp_path / "a.whl"
    path.write_text("a")
    assert [digest_of_wheel(path), digest_of_wheel(path)] == ["1", "1"]
    path.write_text("another")
    assert digest_of_wheel(path) == "2"
