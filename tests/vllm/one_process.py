"""vLLM without a process for its engine core, so that several engines can follow each other in one process, which imports vLLM
once. Import this before vLLM."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any, ClassVar

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine


class OneProcess:
    """What we use of `AsyncLLM`."""

    engine_core = None
    made: ClassVar[list[OneProcess]] = []
    """None is shut down or deleted, as it would end what the next one has started."""

    def __init__(self, config: Any, **_: Any) -> None:
        self.made.append(self)
        self.vllm_config, self._engine = config, LLMEngine.from_vllm_config(config)
        self._outputs: dict[str, list[Any]] = {}

    async def collective_rpc(self, method: str, timeout: float, args: Any) -> list[Any]:
        return self._engine.collective_rpc(method, timeout, args)

    async def generate(self, prompt: Any, params: Any, request_id: str, **settings: Any) -> AsyncIterator[Any]:
        outputs = self._outputs[request_id] = []
        self._engine.add_request(request_id, prompt, params, **settings)
        while True:
            while outputs:
                output = outputs.pop(0)
                yield output
                if output.finished:
                    return
            for output in self._engine.step():
                self._outputs[output.request_id].append(output)
            await asyncio.sleep(0)

    async def pause_generation(self, **_: Any) -> None: ...

    async def resume_generation(self) -> None: ...

    def shutdown(self) -> None: ...


AsyncLLM.from_vllm_config = OneProcess
