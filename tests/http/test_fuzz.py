"""Valid and invalid requests generated from the OpenAPI document: no server errors, no access without the token."""

import os

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ignored_auth,
    response_schema_conformance,
    status_code_conformance,
)

from tests.http.fakes import FakeFleet, endpoints, fake_app
from tests.http.served import make_model, serve

schema = schemathesis.openapi.from_dict(fake_app(FakeFleet()).openapi())
CHECKS = [
    not_a_server_error,
    ignored_auth,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
EXAMPLES = int(os.environ.get("SLIPSTREAM_FUZZ", "3"))
"""Requests per endpoint and mode."""
MAXIMUM = {"n": 3, "max_tokens": 8, "max_completion_tokens": 8, "min_tokens": 4}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("fuzzed"), request_seconds=60.0) as found:
        make_model(found.weights / "step", seed=1)
        yield found


@pytest.mark.parametrize("method, path", [endpoint[:2] for endpoint in endpoints()])
def test_valid_requests_cause_no_server_error(method, path, fleet):
    @given(case=schema[path][method].as_strategy())
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(case):
        check(case, fleet)

    holds()


@pytest.mark.parametrize(
    "method, path", [(method, path) for method, path, of in endpoints() if "requestBody" in of or "parameters" in of]
)
def test_invalid_requests_cause_no_server_error(method, path, fleet):
    @given(case=schema[path][method].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(case):
        check(case, fleet)

    holds()


def check(case, fleet):
    if isinstance(case.body, dict):  # limited, so that no case takes minutes
        for name, most in MAXIMUM.items():
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], most)
    response = case.call(
        base_url=fleet.url, headers=fleet.headers, timeout=100
    )  # programs may have to be compiled first
    case.validate_response(response, checks=CHECKS)
    if case.method == "POST" and any(word in case.path for word in ("pause", "sleep", "wake")):
        # Leave running engines for the next call.
        fleet.post("/resume")
        httpx.post(f"{fleet.url}/wake_up", headers=fleet.headers, timeout=60)
        if fleet.get("/is_sleeping")["is_sleeping"]:  # level 2 dropped the weights
            fleet.post("/bridge/notify_update", {"path": "step"})
