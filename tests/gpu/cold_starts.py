"""Start an engine on each of several checkpoints, one after the other, in one process, and print what it generates and a
fingerprint of its parameters, as one line of JSON each:

    python -m tests.gpu.cold_starts OPTIONS PROMPTS DIRECTORY…

OPTIONS are those of `VllmConfig` as JSON, PROMPTS a list of token ids each."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from slipstream.bridge.bridge import Bridge
from slipstream.bridge.in_process import LocalFleet
from slipstream.config import VllmConfig
from slipstream.runtime import event_loop

from tests.vllm.one_process import OneProcess  # isort: skip  # replaces `AsyncLLM`
from slipstream.engines.vllm.engine import VllmEngine
from tests.gpu.loader_probe import fingerprint
from tests.tiny import served


async def _start(directory: Path, options: VllmConfig) -> LocalFleet:
    return LocalFleet(await VllmEngine.start(directory, options=options))


def main() -> None:
    options, prompts = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    for directory in sys.argv[3:]:
        bridge = Bridge(event_loop.run(_start(Path(directory), VllmConfig(**options))))
        executor: Any = OneProcess.made[-1]._engine.model_executor
        model = executor.driver_worker.worker.model_runner.get_model()
        print(json.dumps({"tokens": served(bridge, prompts, 10), "parameters": fingerprint(model)}), flush=True)
        bridge.close()


if __name__ == "__main__":
    main()
