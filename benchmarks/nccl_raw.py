"""Raw NCCL bandwidth between two processes on one GPU: the reference for weight syncs over `nccl`.

    python benchmarks/nccl_raw.py [--megabytes 2471] [--repeats 10] [--device 0]

Measures one call over all bytes, as broadcast and as send/receive. Needs nccl4py and NCCL 2.30 or later. Other
benchmarks call `measure`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

OPERATIONS = ("broadcast", "send")
WARM_UPS = 3
ANSWER_SECONDS = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2471)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", type=int, default=0)
    arguments = parser.parse_args()
    for operation, rate in measure(arguments.megabytes * 10**6, arguments.repeats, arguments.device).items():
        print(f"{operation:<10} {arguments.megabytes:,} MB  {rate:7.1f} GB/s")


def measure(
    num_bytes: int, repeats: int = 10, device: int = 0, operations: tuple[str, ...] = OPERATIONS
) -> dict[str, float]:
    """Return GB/s by operation: the median over `repeats`, timed in the receiving process."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe() for _ in range(2)]
    environment = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        ranks = [
            spawn.Process(
                target=_rank, args=(rank, num_bytes, repeats, device, operations, pipes[rank][1]), daemon=True
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    try:
        pipes[1][0].send(_answer(pipes[0][0]))  # rank 0's unique id
        seconds: dict[str, list[float]] = _answer(pipes[1][0])
        return {operation: num_bytes / statistics.median(times) / 1e9 for operation, times in seconds.items()}
    finally:
        for process in ranks:
            process.join(10)
            if process.is_alive():
                process.kill()


def _answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError(
            f"no answer from a rank within {ANSWER_SECONDS:.0f} s; NCCL_DEBUG=WARN shows NCCL's messages"
        )
    answer = pipe.recv()
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _rank(rank: int, num_bytes: int, repeats: int, device: int, operations: tuple[str, ...], pipe: Connection) -> None:
    try:
        if (seconds := _run(rank, num_bytes, repeats, device, operations, pipe)) is not None:
            pipe.send(seconds)
    except Exception as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")


def _run(
    rank: int, num_bytes: int, repeats: int, device: int, operations: tuple[str, ...], pipe: Connection
) -> dict[str, list[float]] | None:
    import cuda.core
    import nccl.core
    from nccl.bindings import nccl as raw

    place = cuda.core.Device(device)
    place.set_current()
    if rank == 0:
        unique_id = nccl.core.get_unique_id()
        pipe.send(bytes(unique_id))
    else:
        unique_id = nccl.core.UniqueId.from_bytes(pipe.recv())
    communicator = nccl.core.Communicator.init(2, rank, unique_id)
    handle, stream = raw.Comm(communicator.ptr), place.create_stream()
    memory = place.allocate(num_bytes, stream=stream)
    stream.sync()
    pointer, queue, uint8 = int(memory.handle), int(stream.handle), 1
    calls = {
        "broadcast": lambda: raw.broadcast(pointer, pointer, num_bytes, uint8, 0, handle, queue),
        "send": lambda: (raw.send if rank == 0 else raw.recv)(pointer, num_bytes, uint8, 1 - rank, handle, queue),
    }
    seconds: dict[str, list[float]] = {operation: [] for operation in operations}
    for _ in range(WARM_UPS + repeats):
        for operation in operations:
            start = time.perf_counter()
            calls[operation]()
            stream.sync()
            seconds[operation].append(time.perf_counter() - start)
    communicator.destroy()
    memory.close()
    return {operation: times[WARM_UPS:] for operation, times in seconds.items()} if rank == 1 else None


if __name__ == "__main__":
    main()
