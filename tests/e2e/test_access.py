"""A service that is reachable from other machines: with keys, over TLS, and through a login in a real browser."""

import contextlib
import re
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import trustme
from openai import OpenAI
from playwright.sync_api import Browser, Page, expect

from tests.e2e.live_service import LiveService
from tests.e2e.pages import PATIENCE_MS
from windlass.service.installation.client import ServiceClient, ServiceUnreachableError
from windlass.service.installation.local_key import open_client

NAME = "windlass.localhost"  # browsers resolve it to this machine


def key_id(service: LiveService, name: str) -> str:
    line = next(line for line in service.command("keys", "list").splitlines() if f"  {name}  " in line)
    return line.split()[0]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[LiveService]:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    service = LiveService(home)
    with contextlib.closing(service):
        service.start()
        yield service


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(ignore_https_errors=True)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    yield page
    context.close()


def log_in(page: Page, secret: str) -> None:
    page.get_by_label("API key").fill(secret)
    page.get_by_role("button", name="Log in").click()


def make_model(service: LiveService) -> None:
    folder = service.settings.models_dir / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(b"weights")


def test_the_official_client_with_keys(service: LiveService) -> None:
    make_model(service)
    secrets = {name: service.command("keys", "create", "--name", name) for name in ("ann", "ben")}
    ann, ben, wrong = (
        OpenAI(base_url=f"{service.url}/v1", api_key=secret, max_retries=0) for secret in (*secrets.values(), "wk-none")
    )
    with ann, ben, wrong:
        content = b'{"text": "a"}\n' * 100_000
        file = ann.files.create(file=("a.jsonl", content), purpose="fine-tune")
        job = ann.fine_tuning.jobs.create(model="tiny", training_file=file.id)
        assert [each.id for each in ann.fine_tuning.jobs.list()] == [job.id]
        assert ann.files.content(file.id).content == content
        assert list(ben.files.list()) == []
        assert list(ben.fine_tuning.jobs.list()) == []
        with pytest.raises(openai.NotFoundError):
            ben.fine_tuning.jobs.cancel(job.id)
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            ben.fine_tuning.jobs.create(model="tiny", training_file=file.id)
        with pytest.raises(openai.AuthenticationError, match="wrong, expired or revoked"):
            # longer than the buffers of the connection
            wrong.files.create(file=("a.jsonl", content * 5), purpose="fine-tune")
        assert job.id in service.command("jobs")  # the local command line has a key of its own
        service.command("keys", "revoke", key_id(service, "ann"))
        with pytest.raises(openai.AuthenticationError):
            ann.fine_tuning.jobs.retrieve(job.id)
    audit = service.command("keys", "audit")
    for told in ("create_key", "upload_file", "create_job", "revoke_key", job.id, file.id):
        assert told in audit


def test_a_stream_ends_when_its_key_is_revoked(service: LiveService) -> None:
    secret = service.command("keys", "create", "--name", "ann")
    others, mine = service.submit(owner="ben"), service.submit(owner="ann")
    headers, told = {"Authorization": f"Bearer {secret}"}, []
    with httpx.stream("GET", f"{service.url}/v1/events/stream", headers=headers, timeout=60) as stream:
        for line in stream.iter_lines():
            told.append(line)
            if mine in line:
                service.command("keys", "revoke", key_id(service, "ann"))
    assert mine in "".join(told)
    assert others not in "".join(told)


def test_a_person_logs_in_to_the_dashboard_and_out(service: LiveService, page: Page) -> None:
    secret = service.command("keys", "create", "--name", "ann")
    job_id = service.run(suffix="mine", owner="ann")
    service.run(suffix="others", owner="ben")
    page.goto(f"{service.url}/#/jobs/{job_id}")
    expect(page).to_have_url(re.compile("/login"))
    log_in(page, "wk-wrong")
    expect(page.get_by_role("alert")).to_have_text("This key is wrong, expired or revoked.")
    page.goto(f"{service.url}/#/jobs/{job_id}")
    log_in(page, f" {secret} ")
    expect(page.locator("#detail-id")).to_have_text(job_id)  # the page that the user had asked for
    expect(page.locator("#user")).to_have_text("ann")
    expect(page.locator("#jobs .job")).to_have_count(1)
    expect(page.locator("#connection")).to_have_text("connected")
    service.train(job_id, 1, 2.5)
    expect(page.locator("#figures")).to_contain_text("2.5000")  # received by the event stream
    (cookie,) = page.context.cookies()
    assert (cookie["httpOnly"], cookie["sameSite"], cookie["secure"]) == (True, "Strict", False)
    assert page.evaluate("document.cookie") == ""
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.context.cookies() == []
    page.goto(service.url)
    log_in(page, secret)
    expect(page.locator("#connection")).to_have_text("connected")
    service.command("keys", "revoke", key_id(service, "ann"))
    expect(page.get_by_label("API key")).to_be_visible()  # without a reload, because its stream has ended


def test_a_page_of_another_site_can_do_nothing_with_a_login(service: LiveService, page: Page) -> None:
    secret = service.command("keys", "create", "--name", "ann")
    job_id = service.queue(owner="ann")
    page.goto(f"{service.url}/login")
    log_in(page, secret)
    expect(page.locator("#connection")).to_have_text("connected")
    target = f"{service.url}/v1/fine_tuning/jobs/{job_id}/cancel"
    evil = f'<form method="post" action="{target}"><button>Win</button></form>'
    page.route("http://evil.localhost/**", lambda route: route.fulfill(content_type="text/html", body=evil))
    page.goto("http://evil.localhost/")
    with page.expect_response(target) as answered:
        page.get_by_role("button", name="Win").click()
    assert answered.value.status == 403
    assert service.job(job_id).status == "queued"


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls(tmp_path: Path, authority: trustme.CA) -> dict[str, str]:
    """Settings of a service whose certificate is for another name than this machine's address."""
    issued = authority.issue_cert(NAME)
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    key.chmod(0o600)
    return {"tls_certificate": str(certificate), "tls_key": str(key), "host_names": NAME}


def test_over_tls(tmp_path: Path, tls: dict[str, str], authority: trustme.CA, page: Page) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    service = LiveService(home, **tls)
    with contextlib.closing(service):
        secret = service.command("keys", "create", "--name", "ann", "--role", "admin")
        service.start()
        assert service.url.startswith("https://")
        trusting = ssl.create_default_context()
        authority.configure_trust(trusting)
        with httpx.Client(verify=trusting, trust_env=False) as http:
            headers = {"Authorization": f"Bearer {secret}", "Host": f"{NAME}:{service.port}"}
            path, named = f"{service.url}/v1/files", {"sni_hostname": NAME}
            assert http.get(path, headers=headers, extensions=named).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{service.port}/healthz")

        # The command line trusts only the certificate in its settings, and no other one of the same authority.
        assert service.command("files").count("support-chats") == 2
        with open_client(service.settings) as client:
            assert client.is_healthy()
        other = tmp_path / "other.pem"
        other.write_bytes(authority.issue_cert(NAME).cert_chain_pems[0].bytes())
        with ServiceClient(service.url, certificate=other) as client:
            assert not client.is_healthy()
            with pytest.raises(ServiceUnreachableError, match="has another certificate than the settings name"):
                client.jobs()

        page.goto(f"https://{NAME}:{service.port}")
        log_in(page, secret)
        expect(page.locator("#connection")).to_have_text("connected")
        (cookie,) = page.context.cookies()
        assert cookie["secure"]
