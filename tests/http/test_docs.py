"""Runs the commands of the documentation."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.http.fakes import endpoints
from tests.http.served import make_model, serve

ROOT = Path(__file__).parents[2]
SETUP = 'set -eo pipefail\ncurl() { command curl -sS --fail-with-body "$@"; echo; }\n'


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    path = tmp_path_factory.mktemp("documented")
    with serve(path, model_name="my-model") as found:
        make_model(path / "my-model", seed=1)
        (path / "checkpoints").symlink_to(found.weights)
        (path / "runs").mkdir()
        (path / "runs" / "fleet").symlink_to(found.bridge.run_dir)
        yield path


def blocks(text):
    return re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)


def test_every_line_with_curl_works(documented):
    lines = "\n".join(blocks((ROOT / "docs/http.md").read_text()))
    assert "curl" in lines and "TOKEN=" in lines
    done = subprocess.run(
        ["bash", "-c", SETUP + lines], cwd=documented, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert 'data: {"error"' not in done.stdout


def test_the_page_names_every_endpoint():
    page = (ROOT / "docs/http.md").read_text()
    for _, path, _ in endpoints():
        name = path.rpartition("/")[2] if path.startswith("/bridge") else path
        assert name in page, path
