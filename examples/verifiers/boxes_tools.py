"""The tool of `boxes_taskset.py`. Verifiers starts this module as a server."""

from __future__ import annotations

import verifiers.v1 as vf


def digit_in(box: int) -> str:
    return str((box * 7 + 3) % 10)


class BoxTools(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def look(self, box: int) -> str:
        """Look into a box, and return the digit in it."""
        return digit_in(box)


if __name__ == "__main__":
    BoxTools.run()
