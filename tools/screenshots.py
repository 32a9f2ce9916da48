"""Screenshots of the dashboard for the documentation: python tools/screenshots.py RUN_DIR FAULTS_DIR

RUN_DIR is of a run of the demo, FAULTS_DIR of one under faults, which `slipstream chaos` leaves in `chaos/round-0/run`:

    slipstream demo --engines 2 --mode async --out /tmp/shots/demo
    slipstream chaos examples/train.toml steps=120 engines=3 mode=async task.digits=3 algorithm.entropy_weight=0.01 \\
        --faults 8 --seed 3 --pause 4 --out /tmp/shots/chaos
    python tools/screenshots.py /tmp/shots/demo /tmp/shots/chaos/round-0/run

Needs Debian's `chromium`, and the test extra. The pictures are reduced to 256 colours."""

from __future__ import annotations

import argparse
import json
import shutil
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image
from playwright.sync_api import sync_playwright

from slipstream.observe.dashboard.access import Access
from slipstream.observe.dashboard.local_server import create_local_app
from slipstream.observe.dashboard.recorded_run import RecordedRun

TOKEN = "screenshots"
ASSETS = Path(__file__).parents[1] / "docs" / "assets"
MAX_BYTES = 200_000


@dataclass(frozen=True)
class Shot:
    name: str
    page: str
    is_faults: bool = False
    scheme: str = "light"
    size: tuple[int, int] = (1440, 900)
    query: dict[str, Any] = field(default_factory=dict)


def shots(api: Any, demo: str, faults: str) -> list[Shot]:
    """What is worth showing is found in the runs."""
    syncs = api(f"runs/{demo}/syncs?limit=20")
    sync = api(f"runs/{demo}/syncs/{syncs['version'][3]}")
    length = sync["phases"]["total"]
    around = {"sync": sync["version"], "from": sync["start"] - 6 * length, "to": sync["start"] + 3 * length}
    return [
        Shot("dashboard-run", "run", size=(1440, 1180)),
        Shot("dashboard-compare", "run", scheme="dark", query={"with": faults}),
        Shot("dashboard-rollouts", "rollouts", query=_lively(api, demo), size=(1440, 1040)),
        Shot("dashboard-timeline", "timeline", scheme="dark", query=around),
        Shot("dashboard-mismatch", "mismatch", size=(1440, 1180)),
        Shot("dashboard-fleet-faults", "fleet", is_faults=True, size=(1440, 1180)),
        Shot("dashboard-timeline-faults", "timeline", is_faults=True, query=_gap(api, faults)),
        Shot("dashboard-phone", "run", scheme="dark", size=(400, 860)),
    ]


def _lively(api: Any, run: str) -> dict[str, Any]:
    """A completion of mixed policy versions, in a group whose rewards differ."""
    middle = api(f"runs/{run}")["last_step"] // 3
    rows = api(
        f"runs/{run}/rollouts?view=samples&from={middle}&to={middle + 20}&zero_variance=false&sort=gap&limit=200"
    )["rows"]
    best = max(range(len(rows["id"])), key=lambda n: (rows["version_max"][n] - rows["version"][n], rows["length"][n]))
    step = rows["step"][best]
    return {"row": rows["id"][best], "from": step, "to": step, "colour": "gap", "token": rows["length"][best] - 2}


def _gap(api: Any, run: str) -> dict[str, Any]:
    """From the loss of the first engine until it is back."""
    events = api(f"runs/{run}/fleet")["events"]
    lost = events["kind"].index("lost")
    back = events["kind"].index("joined", lost)
    return {"from": events["at"][lost] - 4, "to": events["at"][back] + 6}


def take(page: Any, base: str, run: str, shot: Shot) -> None:
    query = "&".join(f"{name}={value}" for name, value in {"run": run, **shot.query}.items())
    page.goto(f"{base}{shot.page}?{query}")
    page.wait_for_selector("main:not([aria-busy]) .panel:visible")
    page.wait_for_timeout(700)
    path = ASSETS / f"{shot.name}.png"
    page.screenshot(path=path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {size // 1000} kB")
    if size > MAX_BYTES:
        raise SystemExit(f"{path} is larger than {MAX_BYTES // 1000} kB; show less in it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path)
    parser.add_argument("faults", type=Path)
    parser.add_argument("--only", default="", help="Only pictures with this in their name.")
    arguments = parser.parse_args()
    runs = [arguments.demo, arguments.faults]
    access = Access(lambda token: "viewer" if token == TOKEN.encode() else None, "127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(create_local_app(runs, access), port=0, log_level="warning"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/dashboard/"
    headers = {"Authorization": f"Bearer {TOKEN}"}

    def api(path: str) -> Any:
        with urllib.request.urlopen(urllib.request.Request(f"{base}api/{path}", headers=headers)) as answer:
            return json.load(answer)

    ids = [RecordedRun(run).id for run in runs]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for shot in shots(api, *ids):
            if arguments.only in shot.name:
                width, height = shot.size
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=shot.scheme, extra_http_headers=headers
                )
                take(context.new_page(), base, ids[shot.is_faults], shot)
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
