"""Reward functions: what one gets, what it may answer, and how it is found by name.

    def exact(prompt, completion, answer):
        return float(completion.strip() == answer)

A function gets the prompt's and the completion's text, and of the other facts of `RewardRequest` those that it names
(all of them with `**facts`). It returns a finite number, or a dict of them by name, whose sum is the reward. `async def`
is fine. Imported by the worker processes: nothing heavy here."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import math
import numbers
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.errors import ConfigError
from slipstream.rl.callbacks import Overdue, Raised, Returned
from slipstream.types import FinishReason

RewardFunction: TypeAlias = Callable[..., Any]
"""`fn(prompt, completion, **facts) -> float | dict[str, float]`, or the same with `async def`."""

MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """One completion to judge: `RewardRequest("r12=", "21", answer="21")`."""

    prompt: str
    completion: str
    """Text, without special tokens."""
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    answer: str | None = None
    """A right answer, where the task knows one."""
    prompt_index: int = 0
    """Samples of one prompt are a group."""
    sample_index: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Facts of one's own, passed on by their names; JSON, where functions run in worker processes."""

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if taken := [f.name for f in dataclasses.fields(self) if f.name in self.extra]:
            raise ConfigError(f"extra facts cannot be named {', '.join(taken)}: a request has those already")

    def facts(self) -> dict[str, Any]:
        """Everything but the two texts, by name."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v for k, v in own.items() if k not in ("prompt", "completion", "extra")} | dict(self.extra)


@dataclass(frozen=True, slots=True)
class Judged:
    """A function's answer, checked."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """By name, where the function returned a dict."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Why there is no answer, and what would help."""

    what: str
    fix: str
    detail: str = ""
    """A traceback, or the last that the process printed."""


Verdict: TypeAlias = Judged | Problem | Overdue


def accepted(function: RewardFunction, request: RewardRequest) -> dict[str, Any]:
    """Of the request's facts, those that the function takes."""
    facts = request.facts()
    try:
        known = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in callables have none
        return {}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values()):
        return facts
    return {name: value for name, value in facts.items() if name in known}


def judged(outcome: Returned | Raised) -> Judged | Problem:
    """What a function returned or raised, as a reward or as the reason why there is none."""
    if isinstance(outcome, Raised):
        fix = "fix the function; one that takes `**facts` gets every fact by name"
        return Problem(f"raised {outcome.what}", fix, outcome.trace)
    value = outcome.value
    if not isinstance(value, Mapping):
        found = number_from(value)
        return found if isinstance(found, Problem) else Judged(found)
    if not value or len(value) > MAX_PARTS or not all(isinstance(name, str) for name in value):
        return Problem(
            f"returned the dict {shown(value)}", f"a dict has 1 to {MAX_PARTS} numbers, by names that are text"
        )
    parts = {}
    for name, part in value.items():
        found = number_from(part)
        if isinstance(found, Problem):
            return Problem(f"{found.what} for {name!r}", found.fix)
        parts[name] = found
    total = number_from(sum(parts.values()))
    return total if isinstance(total, Problem) else Judged(total, parts)


def number_from(value: Any) -> float | Problem:
    """A finite float, or why it is none."""
    what = f"returned {shown(value)} ({type(value).__name__})"
    if value is None:
        return Problem(what, "return a number on every path; is a `return` missing?")
    if isinstance(value, bool):
        return Problem(what, "return float(…) of it: 1.0 for right and 0.0 for wrong")
    if not isinstance(value, numbers.Real):
        return Problem(what, "return one Python float per completion; float(…) makes one of an array with one element")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return Problem(what, "return a finite number; does it divide by a length of zero, or take the log of zero?")
    return number


def shown(value: Any) -> str:
    """For errors: a user's value, cut short."""
    try:
        return f"{value!r:.200}"
    except Exception:
        return "something whose repr fails"


# --- by name ----------------------------------------------------------------------------------------------------------


def reward_from(name: str) -> RewardFunction:
    """The function that `"my_module:my_reward"` names; `ConfigError` with the nearest names if there is none.

    Modules are looked for as `import` does, and in the working directory."""
    where, colon, attribute = name.partition(":")
    if not colon or not where or not attribute:
        parent, dot, last = name.rpartition(".")
        hint = f"did you mean {f'{parent}:{last}'!r}?" if dot and not colon else 'write it as "my_module:my_reward"'
        raise ConfigError(f"reward {name!r} does not name a module and a function in it; {hint}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    function: Any = _module(where, name)
    for part in attribute.split("."):
        if not hasattr(function, part):
            known = [n for n in dir(function) if not n.startswith("_") and callable(getattr(function, n, None))]
            raise ConfigError(f"reward {name!r}: {where} has no {part!r}; {_near(part, known, 'it has')}")
        function = getattr(function, part)
    if not callable(function):
        raise ConfigError(
            f"reward {name!r} is no function but {function!r:.80} ({type(function).__name__}); "
            "name something that can be called with a prompt and a completion"
        )
    return function


def name_of(function: RewardFunction) -> str:
    """`"my_module:my_reward"`, from which `reward_from` finds the same function; `ConfigError` if nothing would."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    advice = 'put it in a module of its own and name it as "my_module:my_reward", or run it in this process (workers=0)'
    if not module or not path or "<" in path:
        raise ConfigError(
            f"reward {function!r} has no name by which a worker process could import it (nothing is pickled); {advice}"
        )
    if module == "__main__":
        raise ConfigError(
            f"reward {path!r} is defined in the program itself, which a worker process must not run again; {advice}"
        )
    return f"{module}:{path}"


def _module(where: str, name: str) -> Any:
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            parent, _, last = error.name.rpartition(".")
            path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
            known = [m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")]
            near = _near(last, known, "")
            raise ConfigError(
                f"reward {name!r}: there is no module {error.name!r}; {near or 'is its directory on PYTHONPATH?'}"
            ) from None
        trace = traceback.format_exc().strip()
    except Exception:
        trace = traceback.format_exc().strip()
    raise ConfigError(f"reward {name!r}: importing {where} failed; it must import on its own:\n{trace}")


def _near(name: str, known: list[str], else_list: str) -> str:
    near = difflib.get_close_matches(name, known, n=2)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    return f"{else_list} {', '.join(known[:20]) or 'no functions'}" if else_list else ""
