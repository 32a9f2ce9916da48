"""The exception hierarchy: builtin base classes, and transfer across process boundaries."""

import builtins
import pickle
import re

import pytest

from slipstream import errors
from slipstream.errors import SlipstreamError

ALL = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, SlipstreamError)]
BUILTINS = dict(re.findall(r"(\w+) \[(\w+)\]", errors.__doc__))


@pytest.mark.parametrize("cls", ALL)
def test_errors_are_the_builtins_that_the_docstring_says(cls):
    assert re.search(rf"\b{cls.__name__}\b", errors.__doc__)
    found = {c.__name__ for c in cls.__mro__ if c.__module__ == "builtins"} & {
        "ValueError",
        "TimeoutError",
        "ConnectionError",
        "PermissionError",
    }
    own = next((BUILTINS[c.__name__] for c in cls.__mro__ if c.__name__ in BUILTINS), None)
    assert found == ({own} if own else set())
    if own:
        assert issubclass(cls, getattr(builtins, own))


def test_which_builtins():
    assert BUILTINS == {
        "ConfigError": "ValueError",
        "InvalidPrompt": "ValueError",
        "InvalidSampling": "ValueError",
        "MappingError": "ValueError",
        "NonFiniteWeights": "ValueError",
        "PeerError": "ConnectionError",
        "DeadlineExceeded": "TimeoutError",
        "RewardTimeout": "TimeoutError",
        "EnvironmentTimeout": "TimeoutError",
        "Unauthorized": "PermissionError",
    }


@pytest.mark.parametrize("cls", ALL)
def test_errors_keep_class_and_message(cls):
    error = cls("what happened: 'x'")
    assert str(error) == "what happened: 'x'"
    for again in (errors.from_wire(*errors.to_wire(error)), pickle.loads(pickle.dumps(error))):
        assert type(again) is cls and str(again) == str(error)


def test_other_exceptions_travel_with_their_traceback():
    class Unknown(SlipstreamError):
        pass

    for error in (ValueError("odd"), Unknown("odd")):
        kind, message = errors.to_wire(error)
        assert kind == "EngineFailure" and message.endswith("odd")
    assert str(errors.from_wire("FromTheFuture", "x")) == "FromTheFuture: x"
