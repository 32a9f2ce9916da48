"""A harness for `verifiers` (0.4): a chat loop with a task's tools, in the environment's own process.

Verifiers' own chat harness starts a Python process for every episode, about two seconds of CPU time each."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

NAME = "slipstream_chat"
"""The harness's id."""

__all__ = ["ChatHarness"]


class ChatHarnessConfig(HarnessConfig):
    pass


class ChatHarness(Harness[ChatHarnessConfig]):
    """Ask the model, execute its tool calls, and ask again until it calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        **_: Any,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message.model_dump(exclude_none=True) for message in prompt or ()]
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        async with AsyncExitStack() as stack:
            tools, dispatch, clients = await connect_mcp(servers, stack)
            client = await stack.enter_async_context(httpx.AsyncClient(timeout=None))
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                headers = {"Authorization": f"Bearer {secret}"}
                response = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if response.status_code >= 400:  # a limit of the run was reached, or the episode was ended
                    return ProgramResult(0 if trace.stop_condition else 1, "", response.text)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or ()
                if not calls:
                    return ProgramResult(0, message.get("content") or "", "")
                for call in calls:
                    name = call["function"]["name"]
                    if name in dispatch:
                        content = await call_mcp(clients, dispatch, name, json.loads(call["function"]["arguments"]))
                    else:
                        content = f"error: unknown tool {name!r}"
                    messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": content})
