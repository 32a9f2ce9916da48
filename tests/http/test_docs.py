"""The commands of the documentation, run."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.http.served import make_model, serve

ROOT = Path(__file__).parents[2]
SETUP = 'set -eo pipefail\ncurl() { command curl -sS --fail-with-body "$@"; echo; }\n'


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    path = tmp_path_factory.mktemp("documented")
    with serve(path, model_name="my-model") as found:
        make_model(found.weights / "step-100", seed=1)
        (path / "runs").mkdir()
        (path / "runs" / "fleet").symlink_to(found.bridge.run_dir)
        yield path


def blocks(text):
    return re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", ["docs/http.md", "README.md"])
def test_every_line_with_curl_works(documented, page):
    lines = "\n".join(block for block in blocks((ROOT / page).read_text()))
    assert "curl" in lines and "TOKEN=" in lines
    done = subprocess.run(
        ["bash", "-c", SETUP + lines], cwd=documented, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert 'data: {"error"' not in done.stdout


def test_the_page_tells_of_every_call():
    from slipstream.http.app import CALLS

    page = (ROOT / "docs/http.md").read_text()
    for call in CALLS:
        name = call.path.rpartition("/")[2] if call.path.startswith("/bridge") else call.path
        assert name in page, call.path
