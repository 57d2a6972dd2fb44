"""Refuses requests that the leader does not know. During an upgrade the leader may be of an earlier release
than this gateway."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from msgspec import Struct

from gpubroker_server.core.domain.units import release_numbers
from gpubroker_server.http.problems import Problem
from gpubroker_server.ports.last_values import LeaderSeen


class Since(NamedTuple):
    """The release in which a feature appeared."""

    release: str
    """The first release whose leaders know the feature."""
    named: str
    """The name of the feature in a refusal."""


_PAUSE, _CORDON = Since("0.3.0", "pausing a queue"), Since("0.3.0", "cordon and drain of nodes")
_CLOSURE = Since("0.3.0", "closing a GPU")
_DISK = Since("0.3.0", "looking at the disks of nodes")
_WORKERS = Since("0.3.0", "a worker set")
_STREAM = Since("0.3.0", "a changed work stream")

KNOWN_SINCE: Final[Mapping[str, Since]] = {
    "array": Since("0.3.0", "arrays"),
    "inference_object": Since("0.3.0", "an object that an inference does not copy"),
    "object": Since("0.3.0", "an object as an argument"),
    "retry_on": Since("0.3.0", "retry_on"),
    "upload": Since("0.3.0", "upload and outputs"),
    "environment": Since("0.3.0", "environments"),
    "ray": Since("0.3.0", "a Ray cluster of a task"),
    "secret": Since("0.3.0", "secrets in env"),
    "stack": Since("0.3.0", "reading stacks"),
    "pause": _PAUSE,
    "unpause": _PAUSE,
    "cordon": _CORDON,
    "drain": _CORDON,
    "uncordon": _CORDON,
    "close_gpu": _CLOSURE,
    "reopen_gpu": _CLOSURE,
    "disk": _DISK,
    "clean": _DISK,
    "form": _WORKERS,
    "scale": _WORKERS,
    "signal": _WORKERS,
    "stream": _STREAM,
    "stream_signal": _STREAM,
}
"""Feature -> the release in which it appeared; an earlier leader ignores the feature or handles it wrongly. A
key is a value of `Request.what`, or a word that callers of `LeaderRelease.require` use."""


class LeaderRelease(Struct, frozen=True):
    """Checks that the leader's release knows a feature."""

    leader: Callable[[], LeaderSeen | None]

    def require(self, request: str) -> None:
        """Check that the leader knows a feature. Raises Problem leader-outdated if the leader is of an
        earlier release than the feature. A feature that is not in `KNOWN_SINCE` is known to every leader.
        Without a leader nothing is refused, because the release of the next one is not known."""
        since, leader = KNOWN_SINCE.get(request), self.leader()
        if since is None or leader is None:
            return
        if release_numbers(leader.release) < release_numbers(since.release):
            found = leader.release or f"a release before {since.release}"
            raise Problem(
                "leader-outdated", what=since.named, since=since.release, holder=leader.holder, found=found
            )
