"""The front's end of a trainer's NCCL communicator, as TRL opens it to vLLM's workers: a process that receives tensors into a
checkpoint directory (`nccl_receiver.py`), which then becomes the fleet's next version like any other checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import DeadlineExceeded, TransferError, Unsupported, UpdateInProgress

RECEIVER = Path(__file__).with_name("nccl_receiver.py")
CALL_SECONDS = 600.0
"""Deadline for joining the communicator, and for receiving all tensors of an update."""
MAX_ANSWER = 1 << 20


class TrainerCommunicator:
    """Belongs to one event loop. The process lives from one `init` to the next."""

    def __init__(self, python: str) -> None:
        """`python` is the interpreter of an environment with vLLM and a GPU; empty: there is none."""
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._busy = asyncio.Lock()

    @property
    def is_enabled(self) -> bool:
        return bool(self._python)

    async def init(self, info: Mapping[str, Any]) -> None:
        """Join the communicator of a trainer, which does so at the same time. Replaces an earlier one."""
        if not self.is_enabled:
            raise Unsupported(
                "this server receives no weights over NCCL: start it with nccl_python, an interpreter with vLLM and a GPU, or "
                "use init_info={'backend': 'checkpoint'}. To send weights from GPU to GPU, use "
                "slipstream.connect(...).sync(params)"
            )
        await self.close()
        self._process = await asyncio.create_subprocess_exec(
            self._python, str(RECEIVER), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_ANSWER
        )
        await self._call({"init": dict(info)})

    async def receive(self, update: Mapping[str, Any], root: Path) -> Path:
        """Receive the announced tensors into a new directory under `root`."""
        directory = Path(tempfile.mkdtemp(prefix="nccl-", dir=root))
        try:
            await self._call({"receive": dict(update), "directory": str(directory)})
        except BaseException:
            discard(directory)
            raise
        return directory

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()

    async def _call(self, call: Mapping[str, Any]) -> None:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise TransferError("no communicator with a trainer is open; call /init_weight_transfer_engine first")
        if self._busy.locked():
            raise UpdateInProgress("weights of a trainer are being received")
        async with self._busy:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    process.stdin.write(json.dumps(call).encode() + b"\n")
                    await process.stdin.drain()
                    line = await process.stdout.readline()
            except TimeoutError:
                await self.close()  # NCCL cannot be interrupted otherwise
                raise DeadlineExceeded(
                    f"the trainer did not {'send its tensors' if 'receive' in call else 'join'} within {CALL_SECONDS:g} s"
                ) from None
            except BaseException as error:
                await self.close()
                if isinstance(error, OSError):
                    raise TransferError(f"the process that receives weights has ended: {error}") from None
                raise
        if not line:
            await self.close()
            raise TransferError(f"the process that receives weights ({self._python}) has ended; see the gateway's log")
        if problem := json.loads(line).get("error"):
            raise TransferError(f"receiving weights from the trainer failed: {problem}")


def discard(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
