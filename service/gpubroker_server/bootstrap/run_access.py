"""Gives tasks access to the service, so that they can submit other tasks, and to the secrets of their
tenants."""

import socket
from collections.abc import Mapping

from gpubroker_server.adapters.run_tokens import RunOfToken, RunTokens, key_at
from gpubroker_server.adapters.secret_files import SecretFiles
from gpubroker_server.bootstrap.start_checks import StartRefused, own_host
from gpubroker_server.core.domain.submission import RunSpec
from gpubroker_server.core.domain.task import Task
from gpubroker_server.settings.loading import Settings

_KEY = "run-tokens.key"


class RunAccess:
    """Gives runs access to the service if `submit_from_tasks` is set."""

    def __init__(self, settings: Settings, listener: socket.socket | None) -> None:
        """Read the key of run tokens. Raises StartRefused if it cannot be read, or if no address of a
        gateway is known."""
        self._tokens: RunTokens | None = None
        self._url = settings.tasks_url or ("" if listener is None else url_of(listener))
        if not settings.submit_from_tasks:
            return
        if not self._url:
            raise StartRefused(
                "submit_from_tasks needs tasks_url in a broker without a gateway: the address at which tasks "
                "reach a gateway, such as https://gpubroker.lab"
            )
        try:
            # The key is beside the objects, whose directory all processes on one database share.
            self._tokens = RunTokens(key_at(settings.objects / _KEY))
        except OSError as fault:
            raise StartRefused(f"submit_from_tasks needs a key that cannot be used: {fault}") from None

    def env_of(self, task: Task, spec: RunSpec) -> Mapping[str, str]:
        """Return the environment variables by which the SDK in a run finds the service."""
        if self._tokens is None:
            return {}
        token = self._tokens.token_of(RunOfToken(task.id, task.fence, spec.brings_code))
        return {"GPUBROKER_URL": self._url, "GPUBROKER_TOKEN": token}

    def run_of(self, token: str) -> RunOfToken | None:
        return None if self._tokens is None else self._tokens.run_of(token)


def secrets_of(settings: Settings) -> SecretFiles:
    """Return the store of secrets. It lies beside the objects, which all processes on one database share."""
    return SecretFiles(settings.objects / "secrets")


def url_of(listener: socket.socket) -> str:
    """Return the URL by which clients on this machine connect."""
    host, port = own_host(listener.getsockname()[0]), listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
