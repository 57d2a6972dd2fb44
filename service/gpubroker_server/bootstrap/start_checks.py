"""What must hold before anything starts: a data directory that can be written, a port that is free."""

import contextlib
import fcntl
import os
import pwd
import socket
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import psutil

from gpubroker_server.settings.loading import Settings


class StartRefused(Exception):
    """The service cannot start; the text says why and what to do."""


def process_name() -> str:
    """Of this process alone, of all that share a database: containers may have a host name in common, and
    each of them a process 1; and the lead, presence and slots go by names."""
    return f"{socket.gethostname()}:{token_hex(3)}:{os.getpid()}"


def prepare_data_dir(data_dir: Path) -> None:
    """Create it with mode 0700 and prove that it can be written. Raises StartRefused."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = data_dir / ".writable"
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise StartRefused(
            f"cannot write to the data directory {data_dir}: {error.strerror}; "
            "give it to this user, or name another with --data-dir"
        ) from None


def check_shared(settings: Settings) -> None:
    """Several processes need a database that several can open. Raises StartRefused."""
    if settings.database.startswith("sqlite"):
        raise StartRefused(
            f"{settings.database.removeprefix('sqlite:///')} is a SQLite file, which belongs to one process: "
            "start `gpubroker serve`, or name a PostgreSQL database with database_url (or --database-url)"
        )


def check_task_surroundings(settings: Settings) -> None:
    """Whom tasks run as and where their modules are, as far as this machine knows. Raises StartRefused."""
    if settings.ray.address or settings.engine != "ray":
        return
    if settings.task_user:
        try:
            pwd.getpwnam(settings.task_user)
        except KeyError:
            raise StartRefused(
                f"task_user: this machine has no user {settings.task_user!r}; make one, or name another"
            ) from None
    for path in settings.task_path:
        if not path.is_dir():
            raise StartRefused(f"task_path: {path} is no directory; make it, or name where the modules are")


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind before anything is started, so that a port in use costs nothing. Raises StartRefused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        owner = _port_owner(port)
        raise StartRefused(
            f"cannot listen on {host}:{port}: {error.strerror}{owner}; "
            "stop that process, or choose another port with --port (0 takes a free one)"
        ) from None
    return listener


def own_host(bound: str) -> str:
    """How clients on this machine reach what is bound to this address; one that stands for all is no name."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)  # noqa: S104  # nothing is bound here


@contextlib.contextmanager
def noted_as_broker(data_dir: Path) -> Iterator[None]:
    """While it lasts, `gpubroker down` finds this process by its file."""
    path = data_dir / f"broker-{os.getpid()}.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def brokers_of(data_dir: Path) -> list[int]:
    """The processes that are brokers with this data directory."""
    return [int(path.stem.removeprefix("broker-")) for path in data_dir.glob("broker-*.lock") if _lives(path)]


def _lives(path: Path) -> bool:
    """Whether the process that made the file is there; one that left it behind was killed."""
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _port_owner(port: int) -> str:
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and getattr(connection.laddr, "port", None) == port and connection.pid:
                return f" (process {connection.pid}, {psutil.Process(connection.pid).name()})"
    return ""


def write_private(path: Path, text: str) -> None:
    """Replace a 0600 file in one step; nobody sees half of it, and nobody else sees it at all."""
    draft = path.with_name(path.name + ".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
