"""An hour of syncs, generations and faults: does anything grow?

    python benchmarks/soak.py [--minutes 60] [--json benchmarks/results/soak.json]

One gateway and two engine processes, a trainer in this process. The trainer takes groups from the rollout queue and syncs; two
threads generate through the bridge and over HTTP. Every 30 s there is a fault: engine-0 is killed, an engine is frozen for a
few seconds, or the gateway is killed. engine-1 is never killed, and the gateway only in the first half, so that every role has
one long series. The trend is a line through the longest series of each role, without its first fifth. The exit code is 1 if
something is not flat, or if an error came that is not one of Slipstream's."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

import slipstream
from slipstream.bridge.bridge import Bridge
from slipstream.config import EmbeddedConfig
from slipstream.errors import SlipstreamError
from slipstream.model.checkpoints import hf_weights
from slipstream.types import SamplingParams

FAULT_SECONDS, FREEZE_SECONDS, SAMPLE_SECONDS = 30.0, 4.0, 10.0
FAULTS = ("kill gateway", "kill engine-0", "freeze engine-1", "freeze engine-0")
"""In turn."""
FLAT = {"rss_mb": 20.0, "fds": 5.0, "threads": 5.0, "segments": 1.0, "segment_mb": 1.0}
"""Largest growth per hour that counts as flat. The journal keeps the history of the run and is not judged."""
SAMPLING = SamplingParams(max_tokens=12, n=2)


class Soak:
    def __init__(self, bridge: Bridge, shm: Path, seconds: float, pause: float) -> None:
        self._bridge, self._shm, self._seconds, self._pause = bridge, shm, seconds, pause
        self._begun = time.monotonic()
        self.counts, self.errors, self.untyped = Counter[str](), Counter[str](), list[str]()
        self.series: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
        """Samples by role and pid."""

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._begun

    def run(self, params: object) -> None:
        calls = (self._generate, self._ask_http, self._inject_fault, self._sample)
        threads = [threading.Thread(target=self._repeat, args=(call, 1.0), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        rollouts = self._bridge.rollouts(max_staleness=2, batch=4)
        step = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.9999, tree))
        submitted = 0

        def train() -> None:
            nonlocal params, submitted
            params = step(params)
            self._bridge.sync(params)
            self.counts["syncs"] += 1
            if submitted <= rollouts.position:
                ids = [str(submitted + i) for i in range(4)]
                rollouts.submit(ids, [f"{id}+1=" for id in ids], SAMPLING)
                submitted += 4
            groups = rollouts.take(timeout=20.0)
            rollouts.saved(rollouts.position)
            self.counts["rollouts"] += sum(len(group.completions) for group in groups)

        self._repeat(train, self._pause)
        for thread in threads:
            thread.join()

    def _repeat(self, call: Callable[[], None], pause: float) -> None:
        """Call until the end, and count errors."""
        while self.elapsed < self._seconds:
            try:
                call()
            except SlipstreamError as error:
                self.errors[f"{call.__name__.strip('_')}: {type(error).__name__}"] += 1
            except Exception:
                self.untyped.append(traceback.format_exc())
            self._wait(pause)

    def _generate(self) -> None:
        self.counts["bridge"] += len(self._bridge.generate(["12+3=", "4+5="], SAMPLING, timeout=60.0))

    def _ask_http(self) -> None:
        token = (Path(self._bridge.run_dir) / "token").read_text()
        body = json.dumps({"prompt": "6+7=", "max_tokens": 12}).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        try:
            call = urllib.request.Request(f"{self._bridge.http_url}/v1/completions", body, headers)
            with urllib.request.urlopen(call, timeout=60.0) as answer:
                self.counts["http"] += len(json.load(answer)["choices"])
        except urllib.error.HTTPError as error:
            if error.code not in (429, 503):
                raise
            self.errors[f"HTTP {error.code} {json.load(error)['error']['code']}"] += 1
        except TimeoutError:
            self.errors["HTTP: no answer within 60 s"] += 1
        except OSError as error:  # no gateway listens while it is being restarted
            if not isinstance(getattr(error, "reason", error), ConnectionError):
                raise
            self.errors["HTTP: no connection"] += 1

    def _inject_fault(self) -> None:
        number = sum(self.counts[fault] for fault in FAULTS)
        self._wait(FAULT_SECONDS * (number + 1) - self.elapsed)
        faults = FAULTS if self.elapsed < self._seconds / 2 else FAULTS[1:]
        kind, role = (fault := faults[number % len(faults)]).split()
        process = self._processes().get(role)
        if process is None or self.elapsed > self._seconds - FREEZE_SECONDS:
            return
        self.counts[fault] += 1
        process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "freeze":
            time.sleep(FREEZE_SECONDS)
            process.send_signal(signal.SIGCONT)

    def _processes(self) -> dict[str, psutil.Process]:
        found = {"trainer": psutil.Process()}
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):  # it has just died
                roles = [role for role in ("gateway", "engine-0", "engine-1") if role in child.cmdline()[3:]]
                found |= dict.fromkeys(roles[-1:], child)
        return found

    def _sample(self) -> None:
        """Sample each process, and what the run as a whole has in shared memory and on disk."""
        segments: dict[str, int] = {}
        for role, process in self._processes().items():
            with contextlib.suppress(psutil.Error, OSError):  # it has just died
                row = {"at": self.elapsed, "rss_mb": process.memory_info().rss / 1e6, "fds": process.num_fds()}
                mapped = {}
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    if str(self._shm) in line:
                        start, stop = (int(text, 16) for text in line.split()[0].split("-"))
                        mapped[line.split()[5]] = stop - start
                row |= {"threads": process.num_threads(), "segments": len(mapped)}
                self.series[role, process.pid].append(row)
                segments |= mapped
        segments |= {str(path): 0 for path in self._shm.iterdir() if str(path) not in segments}
        journal = sum(path.stat().st_size for path in Path(self._bridge.run_dir).glob("journal.sqlite*"))
        row = {"at": self.elapsed, "segments": len(segments), "segment_mb": sum(segments.values()) / 1e6}
        self.series["run", 0].append(row | {"journal_mb": journal / 1e6})
        self._wait(SAMPLE_SECONDS - 1.0)

    def _wait(self, seconds: float) -> None:
        time.sleep(max(0.0, min(seconds, self._seconds - self.elapsed)))

    def trends(self) -> list[dict[str, object]]:
        """Growth per hour of every quantity, in the longest series of each role."""
        rows: list[dict[str, object]] = []
        for role in ("trainer", "gateway", "engine", "run"):
            longest = max((rows for (name, _), rows in self.series.items() if name.startswith(role)), key=len)
            kept = longest[len(longest) // 5 :]
            for name in list(kept[0])[1:]:
                values, hours = np.array([row[name] for row in kept]), np.array([row["at"] / 3600 for row in kept])
                slope = float(np.polyfit(hours, values, 1)[0]) if len(kept) > 1 else 0.0
                rows.append(
                    {
                        "role": role,
                        "quantity": name,
                        "minutes": round((kept[-1]["at"] - kept[0]["at"]) / 60, 1),
                        "first": float(values[:5].mean()),
                        "last": float(values[-5:].mean()),
                        "every_five_minutes": [round(float(value), 1) for value in values[::30]],
                        "per_hour": slope,
                        "flat_up_to": FLAT.get(name),
                        "is_flat": slope <= FLAT.get(name, math.inf),
                    }
                )
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds between two syncs")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        os.environ["SLIPSTREAM_SHM_DIR"] = shm
        slipstream.write_sample_model(model := Path(root) / "model")
        engine = EmbeddedConfig(max_num_seqs=16, max_model_len=64)
        with slipstream.launch(
            model, engines=2, engine=engine, http=True, keep_alive=True, run_dir=Path(root) / "run"
        ) as bridge:
            params = hf_weights.load(model)
            bridge.sync(params)
            soak = Soak(bridge, Path(shm), 60 * options.minutes, options.pause)
            soak.run(params)
        left = [path.name for path in Path(shm).iterdir()] + [str(child) for child in psutil.Process().children()]
    results = {
        "minutes": options.minutes,
        "counts": dict(soak.counts),
        "errors": dict(soak.errors),
        "untyped_errors": soak.untyped,
        "left_behind": left,
        "trends": soak.trends(),
        "cores_used": round(sum(os.times()[:4]) / (60 * options.minutes), 2),
        "machine": {
            "cores": os.cpu_count(),
            "platform": platform.platform(),
            "niceness": os.nice(0),
            "load": os.getloadavg(),
        },
    }
    show(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(bool(soak.untyped or left) or not all(row["is_flat"] for row in results["trends"]))


def show(results: dict) -> None:
    table = Table("role", "quantity", "minutes", "first", "last", "per hour", "flat up to", "verdict")
    for row in results["trends"]:
        cells = [f"{row[key]:.1f}" for key in ("minutes", "first", "last", "per_hour")]
        verdict = "" if row["flat_up_to"] is None else "flat" if row["is_flat"] else "[red]GROWS[/]"
        table.add_row(row["role"], row["quantity"], *cells, str(row["flat_up_to"] or ""), verdict)
    console = Console()
    console.print(table)
    console.print(f"{results['minutes']:g} minutes: {results['counts']}")
    console.print(
        f"errors: {results['errors']}; untyped: {results['untyped_errors']}; left behind: {results['left_behind']}"
    )


if __name__ == "__main__":
    main()
