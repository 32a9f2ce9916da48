"""A taskset for `verifiers` (0.4): a digit lies in each of ten boxes, and a tool looks into one.

user          b3            box 3
policy        d             calls the tool: letters stand for boxes
tool          4             the digit
policy        4             answer"""

from __future__ import annotations

import json
import string

import verifiers.v1 as vf
from boxes_tools import BoxTools, digit_in

from slipstream.model.tool_calls import ToolCall

__all__ = ["BoxesTaskset"]

LETTERS = string.ascii_lowercase[:10]


class BoxData(vf.TaskData):
    box: int


class BoxTask(vf.Task[BoxData]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        """0.2 for looking, and 1 for the right digit after that."""
        messages = trace.branches[-1].messages
        looked = any(message.role == "tool" for message in messages)
        text = (messages[-1].content or "") if messages[-1].role == "assistant" else ""
        return 0.2 * looked + float(looked and text == digit_in(self.data.box))


class BoxesTaskset(vf.Taskset[BoxTask, vf.TasksetConfig]):
    def load(self) -> list[BoxTask]:
        return [BoxTask(BoxData(prompt=f"b{box}", box=box), self.config.task) for box in range(10)]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [BoxTools(vf.SharedToolsetConfig())]


def tool_calls(text: str) -> tuple[str, list[ToolCall]]:
    """The calls of the small demo model: one letter. A real model's calls need no parser of their own."""
    is_call = len(text) == 1 and text in LETTERS
    return ("", [ToolCall("look", json.dumps({"box": LETTERS.index(text)}))]) if is_call else (text, [])
