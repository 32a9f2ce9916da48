"""Who sees the dashboard: tokens, cookies, origins, hosts."""

import pytest
from starlette.testclient import TestClient

from slipstream.observe.dashboard.access import Access
from slipstream.observe.dashboard.local_server import create_local_app
from tests.observe.recorded import write_run

BASE = "http://127.0.0.1:8471"
TOKENS = {b"viewer-token": "viewer", b"engine-token": "engine"}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run") / "<script>alert(1)</script>", steps=2)


@pytest.fixture
def access():
    return Access(dict(TOKENS).get, "127.0.0.1", code="the-code")


@pytest.fixture
def client(run_dir, access):
    return TestClient(create_local_app([run_dir], access), base_url=BASE, follow_redirects=False)


def log_in(client, token="viewer-token", **headers):
    return client.post("/dashboard/login", data={"token": token}, headers={"Origin": BASE, **headers})


@pytest.mark.parametrize("path", ["api/runs", "api/runs/x/steps", "api/nothing", "", "run", "app.js"])
def test_nothing_is_shown_without_a_session(path, client):
    response = client.get(f"/dashboard/{path}")
    if path.startswith("api"):
        assert response.status_code == 401 and response.json()["error"]["code"] == "no_session"
    else:
        assert response.status_code == 303 and response.headers["location"].endswith("login")
    assert client.get("/dashboard/login").status_code == 200


def test_a_token_opens_a_session_with_a_cookie_that_scripts_cannot_read(client):
    response = log_in(client)
    assert response.status_code == 303 and response.headers["location"] == "./"
    name, *attributes = response.headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Strict", "Path=/dashboard"} <= set(attributes) and "viewer-token" not in name
    assert client.get("/dashboard/api/runs").status_code == 200
    assert client.post("/dashboard/logout", headers={"Origin": BASE}).status_code == 303
    assert client.get("/dashboard/api/runs").status_code == 401


def test_dashboards_of_one_host_have_cookies_of_their_own(run_dir, client, access):
    """Browsers send cookies to all ports of a host, also those that are no more than a name."""
    base = BASE.replace("8471", "8472")
    app = create_local_app([run_dir], Access(access.role_of, "127.0.0.1"))
    other = TestClient(app, base_url=base, follow_redirects=False)
    answers = [log_in(client), log_in(other, Origin=base)]
    cookies = "; ".join(["flag", *(answer.headers["set-cookie"].partition(";")[0] for answer in answers)])
    for each in (client, other):
        each.cookies.clear()
        assert each.get("/dashboard/api/runs", headers={"Cookie": cookies}).status_code == 200


def test_the_cookie_is_secure_under_tls(run_dir):
    access = Access(dict(TOKENS).get, "gateway.lan", is_tls=True)
    base = "https://gateway.lan:8471"
    client = TestClient(create_local_app([run_dir], access), base_url=base, follow_redirects=False)
    response = client.post("/dashboard/login", data={"token": "viewer-token"}, headers={"Origin": base})
    assert "; Secure" in response.headers["set-cookie"]
    assert client.get("/dashboard/api/runs").status_code == 200
    wrong = {"Origin": base.replace("https", "http")}
    assert client.get("/dashboard/api/runs", headers=wrong).status_code == 403


@pytest.mark.parametrize("token", ["", "wrong", "engine-token", "é" * 3, "x" * 1000, "viewer-token\x00"])
def test_other_tokens_do_not(token, client):
    response = log_in(client, token)
    assert response.status_code == 403 and "set-cookie" not in response.headers
    assert client.get("/dashboard/api/runs").status_code == 401


def test_a_form_without_end_is_refused(client):
    assert log_in(client, "x" * 100_000).status_code == 413


def test_a_bearer_token_works_too(client):
    for token, status in (("viewer-token", 200), ("engine-token", 401), ("wrong", 401)):
        headers = {"Authorization": f"Bearer {token}"}
        assert client.get("/dashboard/api/runs", headers=headers).status_code == status


def test_the_code_of_the_url_works_once(client, access, run_dir):
    assert client.get("/dashboard/login?code=wrong").status_code == 403
    response = client.get("/dashboard/login?code=the-code")
    assert response.status_code == 303 and "HttpOnly" in response.headers["set-cookie"]
    assert client.get("/dashboard/api/runs").status_code == 200
    another = TestClient(create_local_app([run_dir], access), base_url=BASE, follow_redirects=False)
    assert another.get("/dashboard/login?code=the-code").status_code == 403
    assert another.get("/dashboard/login?code=").status_code == 200
    assert another.get("/dashboard/api/runs").status_code == 401


def test_a_revoked_token_ends_its_sessions(client, access):
    known = dict(TOKENS)
    access.role_of = known.get
    log_in(client)
    assert client.get("/dashboard/api/runs").status_code == 200
    del known[b"viewer-token"]
    assert client.get("/dashboard/api/runs").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
)
def test_pages_of_other_sites_get_nothing(headers, client):
    log_in(client)
    for path in ("api/runs", "api/live", "static/app.js"):
        assert client.get(f"/dashboard/{path}", headers=headers).status_code == 403
    assert client.post("/dashboard/login", data={"token": "viewer-token"}, headers=headers).status_code == 403
    assert client.post("/dashboard/logout", headers=headers).status_code == 403
    assert client.get("/dashboard/api/runs", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


def test_a_link_on_another_site_leads_to_the_login(client):
    log_in(client)
    foreign = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/dashboard/", headers=foreign).headers["location"] == "./login"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8471", "127.0.0.1.evil.example", "", "[::1", "0x7f000001"]
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(host, client):
    log_in(client)
    assert client.get("/dashboard/api/runs", headers={"Host": host}).status_code == 421
    assert client.get("/dashboard/api/runs", headers={"Host": "localhost:8471"}).status_code == 200


def test_every_answer_forbids_foreign_scripts_and_frames(client):
    for path in ("/dashboard/login", "/dashboard/", "/dashboard/api/runs", "/dashboard/static/nothing.js"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert (
            headers["x-content-type-options"] == "nosniff" and headers["cross-origin-resource-policy"] == "same-origin"
        )
    assert "<script" not in client.get("/dashboard/login?code=<script>").text


@pytest.mark.parametrize(
    "path", ["../app.py", "..%2fapp.py", "%2e%2e/app.py", "/etc/passwd", "//etc/passwd", ".", "", "%00", "x" * 9999]
)
def test_no_file_outside_of_the_static_ones_is_served(path, client):
    log_in(client)
    assert client.get(f"/dashboard/static/{path}").status_code in (303, 404)


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_changed(method, client):
    log_in(client)
    assert client.request(method, "/dashboard/api/runs").status_code == 405
