"""Cost of a weight sync to an engine in another process, compared with plain copies of the same bytes.

    python benchmarks/weight_sync.py [--layers 30] [--tp 2] [--repeats 7] [--json benchmarks/results/weight_sync.json]
    python benchmarks/weight_sync.py --gpu [--shapes 0.1B,1.2B,8B] [--json benchmarks/results/weight_sync_gpu.json]
    python benchmarks/weight_sync.py --gpu --engine embedded [--shapes 1.2B,8B] [--json FILE]
    python benchmarks/weight_sync.py --load [--gpu] [--engine embedded] [--json FILE]
    python benchmarks/weight_sync.py --replicas [--layers 4] [--json benchmarks/results/weight_sync_replicas.json]

The model has the 135M shape (SmolLM2) in float32, 540 MB. The references are a copy in memory and a transfer over a
loopback socket. Each round measures both references and every transport, with and without checksums, so that a noisy
machine slows all equally. Medians are printed. "transfer" lasts from the first byte until every rank has verified the
weights (send and stage); "pause" is the time during which the engine could not generate. For --gpu, see
weight_sync_gpu.py and weight_sync_embedded.py; for --load, weight_sync_load.py; for --replicas, replica_egress.py."""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import psutil
from rich.console import Console
from rich.progress import track
from rich.table import Table

import slipstream
from slipstream.config import EmbeddedConfig
from slipstream.model.checkpoints.hf_config import to_hf
from slipstream.model.config import ModelConfig
from slipstream.model.transformer import decoder

TARGETS = {
    ("shm", True): ("memcpy", 0.5),
    ("shm", False): ("memcpy", 0.85),
    ("tcp", True): ("socket", 0.75),
    ("tcp", False): ("socket", 0.9),
}
MAX_PAUSE_SHARE = 0.05
MIN_UNCHANGED_SPEEDUP = 20.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--replicas", action="store_true", help="bytes that leave the trainer for 1, 2 and 4 engines")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--gpu", action="store_true", help="JAX trainer and engine on one GPU")
    parser.add_argument(
        "--engine", choices=("vllm", "embedded"), help="with --gpu (default: vllm) and --load (embedded)"
    )
    parser.add_argument("--tiny", action="store_true", help="check --engine embedded on CPU, with a small model")
    parser.add_argument("--load", action="store_true", help="syncs to an engine with more requests than it can run")
    parser.add_argument("--syncs", type=int, help="with --load (default: 200 with --gpu, 20 without)")
    parser.add_argument("--running", type=int, help="with --load (default: 64 with --gpu, 8 without)")
    parser.add_argument("--waiting", type=int, help="with --load (default: 192 with --gpu, 24 without)")
    parser.add_argument(
        "--native",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --gpu: also measure vLLM's own weight transfer",
    )
    parser.add_argument(
        "--shapes", help="with --gpu: model shapes, out of 0.1B, 1.2B, 8B (default: all, or the last two)"
    )
    parser.add_argument("--vllm-python", default=sys.executable, help="Python interpreter with vLLM")
    arguments = parser.parse_args()
    if arguments.load:
        import weight_sync_load

        num_syncs, running, waiting = (200, 64, 192) if arguments.gpu else (20, 8, 24)
        results = weight_sync_load.run(
            arguments.engine or "embedded",
            arguments.gpu,
            arguments.syncs or num_syncs,
            arguments.running or running,
            arguments.waiting or waiting,
            arguments.vllm_python,
        )
        weight_sync_load.show(results, Console(width=130))
        return save(arguments.json, results)
    if arguments.tiny or (arguments.gpu and arguments.engine == "embedded"):
        import weight_sync_embedded

        shapes = (arguments.shapes or "1.2B,8B").split(",")
        results = weight_sync_embedded.run(shapes, arguments.repeats, arguments.tiny)
        save(arguments.json, results)
        sys.exit(not weight_sync_embedded.is_well(results))
    if arguments.gpu:
        import weight_sync_gpu

        shapes = (arguments.shapes or "0.1B,1.2B,8B").split(",")
        results = weight_sync_gpu.run(
            shapes, [weight_sync_gpu.MAIN] if arguments.native else [], arguments.repeats, arguments.vllm_python
        )
        return save(arguments.json, results)
    if arguments.replicas:
        import replica_egress

        return save(arguments.json, replica_egress.run(arguments.layers, Console()))
    results = measure(arguments.layers, arguments.tp, arguments.repeats)
    show(results, Console())
    save(arguments.json, results)


def save(path: Path | None, results: dict) -> None:
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=2) + "\n")


def measure(layers: int, tp: int, repeats: int) -> dict:
    config = ModelConfig(
        "llama", vocab_size=49_152, hidden_size=576, intermediate_size=1536, num_layers=layers, num_heads=9 if tp == 1 else 8,
        num_kv_heads=3 if tp == 1 else 4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    versions = [decoder.init(config, jax.random.key(seed)) for seed in range(2)]
    arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(versions[0])]
    others = [np.asarray(leaf) for leaf in jax.tree.leaves(versions[1])]
    num_bytes = sum(a.nbytes for a in arrays)
    seconds: dict[str, list[float]] = {}
    pauses: dict[str, list[float]] = {}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (root / "config.json").write_text(json.dumps(to_hf(config)))
        options = EmbeddedConfig(max_num_seqs=1, max_model_len=64, tensor_parallel_size=tp)
        lanes = {}
        for transport, hashed in TARGETS:
            run_dir = root / f"{transport}-{hashed}"
            bridge = stack.enter_context(
                slipstream.launch(root, engine=options, run_dir=run_dir, transport=transport, checksums=hashed)
            )
            lanes[transport, hashed] = bridge
        copy, exchange = memcpy_reference(arrays), stack.enter_context(SocketReference(arrays))
        halves = [memcpy_reference([np.array_split(a.reshape(-1), 2)[half] for a in arrays]) for half in range(2)]
        pool = stack.enter_context(ThreadPoolExecutor(2))
        bare = {lane: _engine_memory(bridge) for lane, bridge in lanes.items()}
        for bridge in lanes.values():  # warm-up: the first two syncs create the engine's two images
            for params in (*versions, *versions):
                bridge.sync(params)
        memory = {lane: _engine_memory(bridge) for lane, bridge in lanes.items()}
        for _ in track(range(repeats), "rounds"):
            seconds.setdefault("memcpy", []).append(copy())
            start = time.perf_counter()
            list(pool.map(lambda half: half(), halves))
            seconds.setdefault("memcpy, two threads", []).append(time.perf_counter() - start)
            seconds.setdefault("socket", []).append(exchange.run())
            seconds.setdefault("finding changed elements", []).append(compare_reference(arrays, others))
            for (transport, hashed), bridge in lanes.items():
                name = _name(transport, hashed)
                for params in versions:
                    report = bridge.sync(params)
                    seconds.setdefault(name, []).append(report.send_seconds + report.stage_seconds)
                    pauses.setdefault(name, []).append(report.pause_seconds)
                seconds.setdefault(f"{name}, whole sync", []).append(report.total_seconds)
                unchanged = bridge.sync(params)
                assert unchanged.num_bytes == 0
                seconds.setdefault(f"{name}, nothing changed", []).append(unchanged.total_seconds)
        growth = {_name(*lane): _engine_memory(bridge) - memory[lane] for lane, bridge in lanes.items()}
    return {
        "machine": {"system": platform.platform(), "cpus": psutil.cpu_count(), "jax": jax.__version__},
        "num_bytes": num_bytes,
        "tensors": len(arrays),
        "tp": tp,
        "median_seconds": {name: statistics.median(values) for name, values in seconds.items()},
        "median_pause_seconds": {name: statistics.median(values) for name, values in pauses.items()},
        "engine_memory_growth_bytes": growth,
        "engine_extra_bytes": {_name(*lane): memory[lane] - bare[lane] - num_bytes for lane in lanes},
    }


def memcpy_reference(arrays: list[np.ndarray]) -> Callable[[], float]:
    targets = [np.zeros_like(a) for a in arrays]

    def run() -> float:
        start = time.perf_counter()
        for target, array in zip(targets, arrays):
            np.copyto(target, array)
        return time.perf_counter() - start

    return run


def compare_reference(old: list[np.ndarray], new: list[np.ndarray]) -> float:
    """Time the comparison of old and new values, which sending only changed elements would require."""
    start = time.perf_counter()
    for a, b in zip(old, new):
        np.count_nonzero(a != b)
    return time.perf_counter() - start


class SocketReference:
    """Sends the same bytes over one loopback connection into preallocated memory of another process."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = [a.reshape(-1).view(np.uint8) for a in arrays]

    def __enter__(self) -> SocketReference:
        import multiprocessing as mp

        server = socket.create_server(("127.0.0.1", 0))
        context = mp.get_context("spawn")
        size = sum(a.nbytes for a in self._arrays)
        self._process = context.Process(target=_receive_forever, args=(server.getsockname(), size), daemon=True)
        self._process.start()
        self._socket, _ = server.accept()
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        self.run()
        return self

    def run(self) -> float:
        start = time.perf_counter()
        for array in self._arrays:
            self._socket.sendall(array.data)
        assert self._socket.recv(1) == b"k"
        return time.perf_counter() - start

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.join(5)
        self._process.kill()


def _receive_forever(address: tuple[str, int], size: int) -> None:
    buffer = memoryview(bytearray(size))
    with socket.create_connection(address) as connection:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, 4 << 20)
        while True:
            view = buffer
            while view:
                count = connection.recv_into(view)
                if not count:
                    return
                view = view[count:]
            connection.sendall(b"k")


def _engine_memory(bridge: slipstream.Bridge) -> int:
    """Return the resident memory of the engine process, private and shared, including mapped files."""
    info = psutil.Process(bridge.status().engines[0].info.pid).memory_info()
    return info.rss


def _name(transport: str, hashed: bool) -> str:
    return f"{transport}, checksums {'on' if hashed else 'off'}"


def _verdict(reached: bool) -> str:
    return "PASS" if reached else "FAIL"


def show(results: dict, console: Console) -> None:
    seconds, size = results["median_seconds"], results["num_bytes"]
    title = (
        f"{size / 1e6:.0f} MB in {results['tensors']} tensors to {results['tp']} ranks of an engine in another process"
    )
    table = Table("", "ms", "GB/s", "relative to reference", "target", "", title=title)
    for name in ("memcpy", "memcpy, two threads", "socket"):
        speed = f"{size / seconds[name] / 1e9:.2f}"
        table.add_row(f"[dim]reference:[/] {name}", f"{1e3 * seconds[name]:.1f}", speed, "", "", "")
    table.add_section()
    for (transport, hashed), (reference, target) in TARGETS.items():
        name = _name(transport, hashed)
        ratio, speed = seconds[reference] / seconds[name], f"{size / seconds[name] / 1e9:.2f}"
        cells = (f"{ratio:.2f} × {reference}", f"≥ {target}", _verdict(ratio >= target))
        table.add_row(name, f"{1e3 * seconds[name]:.1f}", speed, *cells)
    table.add_section()
    for transport, hashed in TARGETS:
        name = _name(transport, hashed)
        pause = results["median_pause_seconds"][name]
        share = pause / seconds[name]
        cells = (f"{share:.2%} of the transfer", f"≤ {MAX_PAUSE_SHARE:.0%}", _verdict(share <= MAX_PAUSE_SHARE))
        table.add_row(f"pause: {name}", f"{1e3 * pause:.2f}", "", *cells)
    table.add_section()
    for transport, hashed in TARGETS:
        name = _name(transport, hashed)
        unchanged = seconds[f"{name}, nothing changed"]
        speedup = seconds[f"{name}, whole sync"] / unchanged
        cells = (f"{speedup:.0f} × faster", f"≥ {MIN_UNCHANGED_SPEEDUP:g}", _verdict(speedup >= MIN_UNCHANGED_SPEEDUP))
        table.add_row(f"nothing changed: {name}", f"{1e3 * unchanged:.1f}", "", *cells)
    console.print(table)
    compare = seconds["finding changed elements"]
    full = seconds[_name("tcp", True)]
    console.print(
        f"comparison to find changed elements: {1e3 * compare:.1f} ms, {compare / full:.2f} × a full tcp transfer"
    )
    for name, extra in results["engine_extra_bytes"].items():
        # Shared memory that the engine has not touched (without checksums) does not count.
        console.print(f"engine memory beyond the bare process and one model, {name}: {extra / size:.2f} × the model")
    for name, growth in results["engine_memory_growth_bytes"].items():
        console.print(f"engine memory growth over all measured syncs, {name}: {growth / 1e6:+.1f} MB")


if __name__ == "__main__":
    main()
