"""The dashboard of a real gateway, behind its tokens."""

from pathlib import Path

import httpx

from slipstream.gateway.tokens import make_token, revoke_token
from tests.http.served import eventually


def client(served):
    return httpx.Client(base_url=served.url, timeout=60)


def log_in(http, token):
    return http.post("/dashboard/login", data={"token": token}, headers={"Origin": str(http.base_url).rstrip("/")})


def test_a_viewer_logs_in_and_sees_the_fleet(served):
    run_dir = Path(served.bridge.run_dir)
    token = make_token(run_dir, "viewer", "onlooker")
    with client(served) as http:
        assert http.get("/dashboard").headers["location"] == "dashboard/"
        assert http.get("/dashboard/").status_code == 303
        assert http.get("/dashboard/api/runs").status_code == 401
        assert log_in(http, "wrong").status_code == 403
        assert log_in(http, make_token(run_dir, "engine", "own")).status_code == 403
        assert log_in(http, token).status_code == 303
        (run,) = http.get("/dashboard/api/runs").json()["runs"]
        assert run["state"] == "live" and run["path"] == str(run_dir)

        def is_shown():
            engines = http.get(f"/dashboard/api/runs/{run['id']}/fleet").json()["engines"]
            return [engine["name"] for engine in engines] == ["engine-0"]

        eventually(is_shown)
        assert http.get("/dashboard/api/runs", headers={"Origin": "https://evil.example"}).status_code == 403
        assert http.get("/dashboard/api/runs", headers={"Host": "evil.example"}).status_code == 421
        assert http.get("/metrics").status_code == 401  # the cookie is for the dashboard only
        revoke_token(run_dir, "onlooker")
        revoke_token(run_dir, "own")
        assert http.get("/dashboard/api/runs").status_code == 401
        assert log_in(http, served.token).status_code == 303
        assert http.get("/dashboard/api/runs").status_code == 200
