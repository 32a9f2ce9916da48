"""Reward functions: their arguments, their return values, and how to import one by name.

    def exact(prompt, completion, answer):
        return float(completion.strip() == answer)

A function gets the texts of prompt and completion, and those other facts of `RewardRequest` that it names as parameters
(with `**facts`, all of them). It returns a finite number, or a dict of named numbers, whose sum is the reward. It may be
`async`. Worker processes import this module, so nothing heavy is imported here."""

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
from slipstream.rl.rewards.callbacks import Raised, Returned, TimedOut
from slipstream.types import FinishReason

RewardFunction: TypeAlias = Callable[..., Any]
"""`fn(prompt, completion, **facts) -> float | dict[str, float]`, sync or async."""

MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """One completion to score: `RewardRequest("r12=", "21", answer="21")`."""

    prompt: str
    completion: str
    """Text without special tokens."""
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = "stop"
    answer: str | None = None
    """A right answer, if the task knows one."""
    prompt_index: int = 0
    """Samples with the same prompt index form a group."""
    sample_index: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Additional facts, passed by name. Worker processes need JSON values."""

    def __post_init__(self) -> None:
        for name in ("prompt_token_ids", "token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if taken := [name for name in FACTS if name in self.extra]:
            raise ConfigError(f"extra facts cannot be named {', '.join(taken)}: a request already has these fields")

    def facts(self) -> dict[str, Any]:
        """Everything but the two texts, by name."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: v for k, v in fields.items() if k not in ("prompt", "completion", "extra")} | dict(self.extra)


FACTS = tuple(field.name for field in dataclasses.fields(RewardRequest))


@dataclass(frozen=True, slots=True)
class Reward:
    """A validated return value of a function."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    """The named numbers, if the function returned a dict."""


@dataclass(frozen=True, slots=True)
class RewardProblem:
    """Why a call gave no reward, and a likely fix."""

    what: str
    fix: str
    detail: str = ""
    """A traceback, or the last output of the process."""


RewardOutcome: TypeAlias = Reward | RewardProblem | TimedOut


def accepted_facts(function: RewardFunction, request: RewardRequest) -> dict[str, Any]:
    """The facts of a request that the function has parameters for."""
    facts = request.facts()
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-in callables have no signature
        return {}
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return facts
    return {name: value for name, value in facts.items() if name in parameters}


def to_reward(outcome: Returned | Raised) -> Reward | RewardProblem:
    """Validate what a function returned or raised."""
    if isinstance(outcome, Raised):
        fix = "fix the function; with `**facts` it gets every fact by name"
        return RewardProblem(f"raised {outcome.what}", fix, outcome.trace)
    value = outcome.value
    if not isinstance(value, Mapping):
        number = finite_number(value)
        return number if isinstance(number, RewardProblem) else Reward(number)
    if not value or len(value) > MAX_PARTS or not all(isinstance(name, str) for name in value):
        return RewardProblem(
            f"returned the dict {short_repr(value)}", f"return a dict of 1 to {MAX_PARTS} numbers with string keys"
        )
    parts = {}
    for name, part in value.items():
        number = finite_number(part)
        if isinstance(number, RewardProblem):
            return RewardProblem(f"{number.what} for {name!r}", number.fix)
        parts[name] = number
    total = finite_number(sum(parts.values()))
    return total if isinstance(total, RewardProblem) else Reward(total, parts)


def finite_number(value: Any) -> float | RewardProblem:
    what = f"returned {short_repr(value)} ({type(value).__name__})"
    if value is None:
        return RewardProblem(what, "return a number on every path; is a `return` missing?")
    if isinstance(value, bool):
        return RewardProblem(what, "return float(…) of it: 1.0 for right and 0.0 for wrong")
    if not isinstance(value, numbers.Real):
        return RewardProblem(what, "return one Python float per completion; float(…) converts a one-element array")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return RewardProblem(what, "return a finite number; does it divide by a length of 0, or take the log of 0?")
    return number


def short_repr(value: Any) -> str:
    """A user's value for an error message, truncated."""
    try:
        return f"{value!r:.200}"
    except Exception:
        return "an object whose repr fails"


# --- import by name ---------------------------------------------------------------------------------------------------


def import_function(name: str, kind: str = "reward") -> Callable[..., Any]:
    """Import the function or class named `"my_module:my_reward"`, of this `kind`; a `ConfigError` suggests the closest names.

    Modules are found as `import` finds them, and in the working directory."""
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        parent, dot, last = name.rpartition(".")
        hint = f"did you mean {f'{parent}:{last}'!r}?" if dot and not colon else 'write it as "my_module:my_reward"'
        raise ConfigError(f"{kind} {name!r} does not name a module and a function; {hint}")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    function: Any = _import_module(module, f"{kind} {name!r}")
    for part in attribute.split("."):
        if not hasattr(function, part):
            known = [n for n in dir(function) if not n.startswith("_") and callable(getattr(function, n, None))]
            hint = _suggestion(part, known) or f"it has {', '.join(known[:20]) or 'no functions'}"
            raise ConfigError(f"{kind} {name!r}: {module} has no {part!r}; {hint}")
        function = getattr(function, part)
    if not callable(function):
        raise ConfigError(
            f"{kind} {name!r} is not a function but {function!r:.80} ({type(function).__name__}); "
            "name something that can be called"
        )
    return function


def import_name(function: RewardFunction) -> str:
    """The `"my_module:my_reward"` by which a worker can import the function; `ConfigError` if there is none."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    advice = 'put it in a module and name it as "my_module:my_reward", or run it in this process (workers=0)'
    if not module or not path or "<" in path:
        raise ConfigError(
            f"reward {function!r} has no name by which a worker process could import it (nothing is pickled); {advice}"
        )
    if module == "__main__":
        raise ConfigError(
            f"reward {path!r} is defined in the main program, which a worker process must not run again; {advice}"
        )
    return f"{module}:{path}"


def _import_module(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
            parent, _, last = error.name.rpartition(".")
            path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
            known = [m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")]
            hint = _suggestion(last, known) or "is its directory on PYTHONPATH?"
            raise ConfigError(f"{what}: there is no module {error.name!r}; {hint}") from None
        trace = traceback.format_exc().strip()
    except Exception:
        trace = traceback.format_exc().strip()
    raise ConfigError(f"{what}: importing {module} failed:\n{trace}")


def _suggestion(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=2)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""
