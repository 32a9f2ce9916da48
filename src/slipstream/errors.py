"""Everything that Slipstream raises on purpose.

    SlipstreamError
    ├── ConfigError               a config file, override or argument does not fit; nothing was started
    ├── RequestError              what was asked cannot be done; nothing changed
    │   ├── InvalidPrompt
    │   ├── InvalidSampling
    │   ├── UnknownEngine
    │   ├── NameInUse             an engine of this name is in the fleet; it may be one that has died unseen
    │   ├── UnknownVersion        a step of an update names a version that is not under way
    │   ├── MessageTooLarge
    │   ├── OutOfPages            the sequence cannot fit into the KV cache, however empty
    │   └── Unsupported           this engine or build cannot do it
    ├── CheckpointError           a saved training state is missing, torn, damaged or of another model
    ├── LogError                  a logger could not take a record; names the logger
    ├── NotReady                  no engine holds a committed policy (yet)
    ├── WeightsError
    │   ├── MappingError          names, shapes or dtypes of trainer and engine do not fit together
    │   ├── PlanMismatch          both ends do not hold the same plan
    │   ├── ChecksumMismatch      bytes changed on the way
    │   ├── VersionError          versions only grow
    │   ├── UpdateInProgress      another update is under way
    │   ├── FleetChanged          engines came or went since the trainer looked; `bridge.sync` looks again and retries
    │   └── TransferError         bytes could not be moved
    ├── RolloutError
    │   ├── StaleRollouts         what is asked for would be older than the run allows
    │   └── JournalError          the run's journal cannot be read, or contradicts itself
    ├── PeerError
    │   ├── EngineLost            an engine died or stopped answering
    │   ├── GatewayLost           the gateway died or cannot be reached
    │   └── LaunchFailed          a process did not come up; carries the end of its log
    ├── DeadlineExceeded          a wait ran out of time; names what was waited for
    ├── Unauthorized              token missing or wrong
    ├── TlsError                  two sides do not agree on TLS: another CA, another name, or only one of them speaks it
    ├── ProtocolMismatch          peers speak different protocol versions, or nonsense
    ├── EngineFailure             an engine failed inside; carries its traceback as text
    ├── RewardError               a completion could not be judged; it has no reward, which is not a reward of zero
    │   ├── RewardFailed          the function raised, ended its process, or returned what is no finite number
    │   └── RewardTimeout
    └── EpisodeError              an episode could not be finished; names the environment and the turn
        ├── EnvironmentFailed     it raised, or returned what it should not
        └── EnvironmentTimeout

An error crosses a process boundary as two strings, its class name and its message (`to_wire`, `from_wire`): the
peer's name and, for `EngineFailure`, its traceback are part of the message. Nothing is ever pickled.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of the tree above."""


class ConfigError(SlipstreamError): ...


class RequestError(SlipstreamError): ...


class InvalidPrompt(RequestError): ...


class InvalidSampling(RequestError): ...


class UnknownEngine(RequestError): ...


class NameInUse(RequestError): ...


class UnknownVersion(RequestError): ...


class MessageTooLarge(RequestError): ...


class OutOfPages(RequestError): ...


class Unsupported(RequestError): ...


class CheckpointError(SlipstreamError): ...


class LogError(SlipstreamError): ...


class NotReady(SlipstreamError): ...


class WeightsError(SlipstreamError): ...


class MappingError(WeightsError): ...


class PlanMismatch(WeightsError): ...


class ChecksumMismatch(WeightsError): ...


class VersionError(WeightsError): ...


class UpdateInProgress(WeightsError): ...


class FleetChanged(WeightsError): ...


def wants_elsewhere(engine: str) -> FleetChanged:
    """For an engine whose `begin` answers otherwise than the trainer had reason to expect."""
    return FleetChanged(f"engine {engine!r} wants its weights elsewhere than after the last update; trying again")


class TransferError(WeightsError): ...


class RolloutError(SlipstreamError): ...


class StaleRollouts(RolloutError): ...


class JournalError(RolloutError): ...


class PeerError(SlipstreamError): ...


class EngineLost(PeerError): ...


class GatewayLost(PeerError): ...


class LaunchFailed(PeerError): ...


class DeadlineExceeded(SlipstreamError): ...


class Unauthorized(SlipstreamError): ...


class TlsError(SlipstreamError): ...


class ProtocolMismatch(SlipstreamError): ...


class EngineFailure(SlipstreamError): ...


class RewardError(SlipstreamError): ...


class RewardFailed(RewardError): ...


class RewardTimeout(RewardError): ...


class EpisodeError(SlipstreamError): ...


class EnvironmentFailed(EpisodeError): ...


class EnvironmentTimeout(EpisodeError): ...


def _tree(root: type[SlipstreamError]) -> dict[str, type[SlipstreamError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


_BY_NAME = _tree(SlipstreamError)


def to_wire(error: BaseException) -> tuple[str, str]:
    """`(kind, message)`. A foreign exception travels as an `EngineFailure` with its traceback as text."""
    if isinstance(error, SlipstreamError) and type(error).__name__ in _BY_NAME:
        return type(error).__name__, str(error)
    import traceback

    return EngineFailure.__name__, "".join(traceback.format_exception(error)).strip()


def from_wire(kind: str, message: str) -> SlipstreamError:
    """The error that `to_wire` described; an unknown kind (a newer peer) becomes the base class and keeps its name."""
    if kind in _BY_NAME:
        return _BY_NAME[kind](message)
    return SlipstreamError(f"{kind}: {message}")
