"""Schemathesis makes requests from our own description, right ones and wrong ones: nothing fails, nothing answers with
what the description does not have.
"""

import os
import tempfile
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.unit.service.api_client import make_model, no_hub
from windlass.service.app import create_app
from windlass.service.settings import Settings

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Streams have no end.
ENDLESS = r"/stream$"
HOST = "127.0.0.1:8642"
NUM_CASES = int(os.environ.get("WINDLASS_TEST_SCHEMA_CASES", "8"))


# Of this process: operations are test cases, so that the app is there before any fixture.
HOME = tempfile.TemporaryDirectory()
APP = create_app(Settings(home=Path(HOME.name), port=8642, max_file_mib=1), hub_files=no_hub)

schema = schemathesis.openapi.from_dict(APP.openapi()).exclude(path_regex=ENDLESS)
schema.app = APP


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    make_model(Path(HOME.name) / "models" / "tiny")


@schema.parametrize()
@hypothesis.settings(max_examples=NUM_CASES, deadline=None, derandomize=True)
def test_no_request_is_answered_with_what_is_not_described(case: Case) -> None:
    case.call_and_validate(base_url=f"http://{HOST}", checks=CHECKS)
