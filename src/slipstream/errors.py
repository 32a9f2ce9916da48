"""All exceptions that Slipstream raises on purpose. Those with a builtin in brackets are also instances of it.

    SlipstreamError
    ├── ConfigError [ValueError]          invalid config file, override or argument; nothing was started
    │   └── UnknownArchitecture           our decoder does not know the model; vLLM may
    ├── RequestError                      the request cannot be served; nothing changed
    │   ├── InvalidPrompt [ValueError]
    │   ├── InvalidSampling [ValueError]
    │   ├── UnknownEngine
    │   ├── UnknownAdapter                the engine has no adapter of this name; sync it first
    │   ├── NameInUse                     an engine of this name is in the fleet; its death may not have been noticed yet
    │   ├── UnknownVersion                the version is not part of a running update
    │   ├── MessageTooLarge
    │   ├── SuspectRequest                two engines were lost while they served it; it is not given to a third
    │   ├── OutOfPages                    the sequence does not fit into the KV cache, even an empty one
    │   ├── BridgeClosed                  the bridge was closed before the call
    │   ├── UnknownSession                no session of this id was opened, or its trajectories are deleted
    │   ├── SessionBusy                   another turn of the session is being generated
    │   ├── SessionClosed                 the session has ended, and takes no more turns
    │   └── Unsupported                   not supported by this engine or installation
    ├── CheckpointError                   saved training state is missing, incomplete, damaged or of another model
    ├── LogError                          a logger rejected a record; names the logger
    ├── NotReady                          no engine has a committed policy yet
    ├── Overloaded                        too much is queued already; retry later
    ├── WeightsError
    │   ├── MappingError [ValueError]     names, shapes or dtypes of trainer and engine do not match
    │   ├── PlanMismatch                  trainer and engine have different transfer plans
    │   ├── ChecksumMismatch              bytes changed in transfer
    │   ├── NonFiniteWeights [ValueError] NaN or infinity in the weights to sync
    │   ├── VersionError                  versions must increase
    │   ├── UpdateInProgress              another update is running
    │   ├── NoAdapterSlot                 an engine has no room for another adapter; unload one
    │   ├── FleetChanged                  engines joined or left during an update; `bridge.sync` retries
    │   │   └── DeltaMismatch             an engine cannot apply a delta; `bridge.sync` sends all bytes
    │   └── TransferError                 bytes could not be transferred
    ├── RolloutError
    │   ├── StaleRollouts                 the result would be older than the run allows
    │   └── JournalError                  the run's journal is of another format or another run
    │       ├── JournalUnavailable        it cannot be read or written now, for example because the disk is full
    │       └── JournalDamaged            records are changed or missing; `slipstream journal` says which
    ├── PeerError [ConnectionError]
    │   ├── EngineLost                    an engine died or stopped responding
    │   ├── EngineQuarantined             an engine returned wrong results; it gets no requests until it passes a probe
    │   ├── EngineDrained                 an engine that is taken out of use gave a request back
    │   ├── GatewayLost                   the gateway died or is unreachable
    │   ├── LaunchFailed                  a process did not start; includes the end of its log
    │   └── InjectedFault                 from `slipstream chaos`
    ├── DeadlineExceeded [TimeoutError]   a wait timed out; names what was waited for
    ├── Unauthorized [PermissionError]    missing or wrong bearer token
    │   └── Forbidden                     the token is valid, but its role does not permit the call
    ├── TlsError                          TLS failed: another CA, another name, or only one side uses TLS
    ├── ProtocolMismatch                  the peer has another protocol version or sent an invalid message
    ├── EngineFailure                     internal error in an engine; includes its traceback as text
    ├── UpdateNotFinite                   the loss or gradient of a training step is NaN or infinite; names its engines
    ├── RewardError                       a completion could not be scored, which is not a reward of zero
    │   ├── RewardFailed                  the function raised, exited, or returned something other than a finite number
    │   └── RewardTimeout [TimeoutError]
    └── EpisodeError                      an episode could not be finished; names the environment and the turn
        ├── EnvironmentFailed             the environment raised or returned an invalid value
        └── EnvironmentTimeout [TimeoutError]

Errors cross process boundaries as class name and message (`to_wire`, `from_wire`), never pickled. The message includes the
peer's name and, for `EngineFailure`, the traceback.
"""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base class of all errors of this package; the module docstring of `slipstream.errors` shows the whole tree."""


class ConfigError(SlipstreamError, ValueError): ...


class UnknownArchitecture(ConfigError): ...


class RequestError(SlipstreamError): ...


class InvalidPrompt(RequestError, ValueError): ...


class InvalidSampling(RequestError, ValueError): ...


class UnknownEngine(RequestError): ...


class UnknownAdapter(RequestError): ...


class NameInUse(RequestError): ...


class UnknownVersion(RequestError): ...


class MessageTooLarge(RequestError): ...


class SuspectRequest(RequestError): ...


class OutOfPages(RequestError): ...


class BridgeClosed(RequestError): ...


class UnknownSession(RequestError): ...


class SessionBusy(RequestError): ...


class SessionClosed(RequestError): ...


class Unsupported(RequestError): ...


class CheckpointError(SlipstreamError): ...


class LogError(SlipstreamError): ...


class NotReady(SlipstreamError): ...


class Overloaded(SlipstreamError): ...


class WeightsError(SlipstreamError): ...


class MappingError(WeightsError, ValueError): ...


class PlanMismatch(WeightsError): ...


class ChecksumMismatch(WeightsError): ...


class NonFiniteWeights(WeightsError, ValueError): ...


class VersionError(WeightsError): ...


class UpdateInProgress(WeightsError): ...


class NoAdapterSlot(WeightsError): ...


class FleetChanged(WeightsError): ...


class DeltaMismatch(FleetChanged): ...


class TransferError(WeightsError): ...


class RolloutError(SlipstreamError): ...


class StaleRollouts(RolloutError): ...


class JournalError(RolloutError): ...


class JournalUnavailable(JournalError): ...


class JournalDamaged(JournalError): ...


class PeerError(SlipstreamError, ConnectionError): ...


class EngineLost(PeerError): ...


class EngineQuarantined(PeerError): ...


class EngineDrained(PeerError): ...


class GatewayLost(PeerError): ...


class LaunchFailed(PeerError): ...


class InjectedFault(PeerError): ...


class DeadlineExceeded(SlipstreamError, TimeoutError): ...


class Unauthorized(SlipstreamError, PermissionError): ...


class Forbidden(Unauthorized): ...


class TlsError(SlipstreamError): ...


class ProtocolMismatch(SlipstreamError): ...


class EngineFailure(SlipstreamError): ...


class UpdateNotFinite(SlipstreamError): ...


class RewardError(SlipstreamError): ...


class RewardFailed(RewardError): ...


class RewardTimeout(RewardError, TimeoutError): ...


class EpisodeError(SlipstreamError): ...


class EnvironmentFailed(EpisodeError): ...


class EnvironmentTimeout(EpisodeError, TimeoutError): ...


_BY_NAME = {name: cls for name, cls in globals().items() if isinstance(cls, type) and issubclass(cls, SlipstreamError)}


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return `(class name, message)`. An exception from outside this tree becomes an `EngineFailure` with its traceback."""
    if _BY_NAME.get(type(error).__name__) is type(error):
        return type(error).__name__, str(error)
    import traceback

    return EngineFailure.__name__, "".join(traceback.format_exception(error)).strip()


def from_wire(kind: str, message: str) -> SlipstreamError:
    """Return the error that `to_wire` described. An unknown class name (of a newer peer) becomes a `SlipstreamError`."""
    if kind in _BY_NAME:
        return _BY_NAME[kind](message)
    return SlipstreamError(f"{kind}: {message}")
