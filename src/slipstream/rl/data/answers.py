"""Answer extraction: the part of a completion that a task scores."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

_NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")


def tagged(text: str) -> str:
    """`"so <answer> 4 </answer>."` gives `"4"`; text without tags is the answer as a whole."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return (found[-1] if found else text).strip()


def last_number(text: str) -> str:
    """`"8 + 9 = 17."` gives `"17"`, `"1,250 in all"` gives `"1250"`; text without a number gives `""`.

    For models that answer in sentences. In `"9-4"` the second number is 4, in `"9 - 13 = -4"` the last is -4."""
    found = [match.group() for match in _NUMBER.finditer(tagged(text))]
    return found[-1].replace(",", "") if found else ""


EXTRACTORS: Mapping[str, Callable[[str], str]] = {"tags": tagged, "number": last_number}
"""By `TaskConfig.extract`."""
