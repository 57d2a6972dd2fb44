"""Gives tasks access to the service, so that they can submit other tasks, and to the secrets of their
tenants."""

import socket
from collections.abc import Mapping

from gpubroker_server.adapters.run_tokens import RunOfToken, RunTokens, key_at, ray_token_of
from gpubroker_server.adapters.secret_files import SecretFiles
from gpubroker_server.bootstrap.start_checks import StartRefused, own_host
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import Task
from gpubroker_server.ports.store import StoreUnavailable
from gpubroker_server.settings.loading import Settings

_KEY = "run-tokens.key"


class RunAccess:
    """Gives runs access to the service if `submit_from_tasks` is set."""

    def __init__(self, settings: Settings, listener: socket.socket | None) -> None:
        """Read the key of run tokens. Raises StartRefused if it cannot be read, or if no address of a
        gateway is known."""
        self._tokens: RunTokens | None = None
        # The key is beside the objects, whose directory all processes on one database share.
        self._key_file = settings.objects / _KEY
        self._url = settings.tasks_url or ("" if listener is None else url_of(listener))
        if not settings.submit_from_tasks:
            return
        if not self._url:
            raise StartRefused(
                "submit_from_tasks needs tasks_url in a broker without a gateway: the address at which tasks "
                "reach a gateway, such as https://gpubroker.lab"
            )
        try:
            self._tokens = RunTokens(key_at(self._key_file))
        except OSError as fault:
            raise StartRefused(f"submit_from_tasks needs a key that cannot be used: {fault}") from None

    def env_of(self, task: Task, spec: RunSpec) -> Mapping[str, str]:
        """Return the environment variables by which the SDK in a run finds the service, and by which the
        ranks of a Ray cluster know each other. Raises StoreUnavailable if the key of tokens cannot be
        read."""
        env: dict[str, str] = {}
        if self._tokens is not None:
            token = self._tokens.token_of(RunOfToken(task.id, task.fence, spec.brings_code))
            env = {"GPUBROKER_URL": self._url, "GPUBROKER_TOKEN": token}
        if spec.ray:
            env["RAY_AUTH_TOKEN"] = ray_token_of(self._key(), task.id, task.fence)
        return env

    def _key(self) -> bytes:
        try:
            return key_at(self._key_file)
        except OSError as fault:
            raise StoreUnavailable(f"the key of tokens cannot be used: {fault}") from None

    def run_of(self, token: str) -> RunOfToken | None:
        return None if self._tokens is None else self._tokens.run_of(token)


def secrets_of(settings: Settings) -> SecretFiles:
    """Return the store of secrets. It lies beside the objects, which all processes on one database share."""
    return SecretFiles(settings.objects / "secrets")


def url_of(listener: socket.socket) -> str:
    """Return the URL by which clients on this machine connect."""
    host, port = own_host(listener.getsockname()[0]), listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
