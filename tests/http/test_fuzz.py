"""Everything that the front's own description allows, and much that it does not: never a failure of ours, never without the
token."""

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

from slipstream.http.app import CALLS
from slipstream.http.openapi import description
from tests.http.served import make_model, serve

schema = schemathesis.openapi.from_dict(description(CALLS))
CHECKS = [
    not_a_server_error,
    ignored_auth,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
MUCH = {"n": 3, "max_tokens": 8, "max_completion_tokens": 8, "min_tokens": 4}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("fuzzed"), request_seconds=60.0) as found:
        make_model(found.weights / "step", seed=1)
        yield found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_no_call_fails_inside(call, fleet):
    @given(case=schema[call.path][call.method].as_strategy())
    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(case):
        check(case, fleet)

    holds()


@pytest.mark.parametrize(
    "call", [call for call in CALLS if call.body or call.query], ids=lambda call: f"{call.method} {call.path}"
)
def test_nor_by_what_its_description_does_not_allow(call, fleet):
    @given(case=schema[call.path][call.method].as_strategy(generation_mode=GenerationMode.NEGATIVE))
    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    def holds(case):
        check(case, fleet)

    holds()


def check(case, fleet):
    if isinstance(case.body, dict):  # as it is, but not for minutes
        for name, most in MUCH.items():
            if isinstance(case.body.get(name), int):
                case.body[name] = min(case.body[name], most)
    response = case.call(base_url=fleet.url, headers=fleet.headers, timeout=100)  # programs may have to be compiled
    case.validate_response(response, checks=CHECKS)
    if any(word in case.path for word in ("pause", "sleep", "wake")):  # the next call finds engines that run
        fleet.post("/resume")
        httpx.post(f"{fleet.url}/wake_up", headers=fleet.headers, timeout=60)
        if fleet.get("/is_sleeping")["is_sleeping"]:  # dropped, at level 2
            fleet.post("/bridge/notify_update", {"path": "step"})
