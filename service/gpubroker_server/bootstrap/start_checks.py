"""Checks before a process starts, and the files that it leaves in its data directory."""

import contextlib
import os
import pwd
import resource
import socket
import ssl
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from stat import S_IMODE, S_ISVTX
from tempfile import TemporaryFile
from typing import Any

import psutil
import structlog
from msgspec import structs

from gpubroker_server.core.domain.visible_gpus import VARIABLE
from gpubroker_server.ports.last_values import LeaderSeen
from gpubroker_server.settings.loading import LOOPBACK, Settings
from gpubroker_server.settings.ray import client_server_refused

log = structlog.get_logger("gpubroker.start")

OTHER_FILES = 1024
"""The open files besides connections: those of databases, model servers and runs."""

_OUR_FILES = frozenset({"client.json", "gpubroker.db", "blobs", "ray-head.log", ".gpubroker"})
"""The names of files of which each shows that a directory was a data directory before."""


class StartRefused(Exception):
    """The service cannot start. The message says why and what to do."""


def process_name() -> str:
    """Return a name that is unique among processes on one database: containers may share a host name, and all
    may have process id 1."""
    return f"{socket.gethostname()}:{token_hex(3)}:{os.getpid()}"


def prepare_data_dir(data_dir: Path) -> None:
    """Create the data directory with mode 0700, or set the mode of an existing one, and check that it can be
    written to. Raises StartRefused."""
    try:
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_private(data_dir)
        TemporaryFile(dir=data_dir).close()  # without a name, because several processes may start at once
    except OSError as error:
        raise StartRefused(
            f"cannot write to the data directory {data_dir}: {error.strerror}; "
            "give it to this user, or name another with --data-dir"
        ) from None


def keep_private(directory: Path) -> None:
    """Set a directory that other users may enter to mode 0700. A directory of another user, such as a volume
    of a container, or one with files of other programs, such as /tmp, stays as it is."""
    status = directory.stat()
    if not status.st_mode & 0o077:
        return
    mode = f"it had mode {S_IMODE(status.st_mode):o}"
    names = {path.name for path in directory.iterdir()}
    if status.st_uid == os.geteuid() and not status.st_mode & S_ISVTX and (not names or names & _OUR_FILES):
        directory.chmod(0o700)
        said = "others could enter this directory; it is set to mode 0700 now"
        log.warning(said, path=str(directory), fault=mode)
    else:
        fault = f"{mode} and is not this user's alone; give the service a directory of mode 0700"
        log.warning("others than this user may enter this directory", path=str(directory), fault=fault)


def check_installed(settings: Settings, *, leads: bool) -> None:
    """Check that the packages that these settings need are installed. Raises StartRefused."""
    needed = []
    if leads and settings.engine == "ray":
        needed.append(("ray", "ray", "to run tasks (engine: ray)"))
    if settings.triton.grpc_port or (leads and any(server.node for server in settings.triton.servers)):
        needed.append(("grpc", "triton", "to speak gRPC with model servers (triton)"))
    if leads and settings.engine == "ray" and settings.ray.dashboard and find_spec("aiohttp_cors") is None:
        raise StartRefused(
            "ray.dashboard needs more to be installed: pip install 'ray[default]'; or set it to false"
        )
    if settings.oidc:
        needed.append(("jwt", "oidc", "to accept JWTs (oidc)"))
    missing = [(extra, purpose) for module, extra, purpose in needed if find_spec(module) is None]
    if missing:
        extras = ",".join(extra for extra, _ in missing)
        raise StartRefused(
            f"{' and '.join(purpose for _, purpose in missing)} more has to be installed: pip install "
            f"'gpubroker-server[{extras}]'"
        )


def check_reach(settings: Settings) -> None:
    """Check that `allowed_hosts` is set if other machines can reach the service's address. Raises
    StartRefused."""
    if settings.host in LOOPBACK or settings.allowed_hosts:
        return
    raise StartRefused(
        f"host is {settings.host}, which other machines reach, and allowed_hosts is empty; list there the "
        "host names that clients use (GPUBROKER_ALLOWED_HOSTS=gpus.example.org; localhost if the port of a "
        "container is published on this machine alone) and put TLS in front, or listen on 127.0.0.1"
    )


def check_shared(settings: Settings) -> None:
    """Check that separate gateways and brokers use PostgreSQL. Raises StartRefused."""
    if settings.database.startswith("sqlite"):
        raise StartRefused(
            f"{settings.database.removeprefix('sqlite:///')} is a SQLite file, which belongs to one process: "
            "start `gpubroker serve`, or name a PostgreSQL database with database_url (or --database-url)"
        )


def check_disk_roots(settings: Settings) -> None:
    """Check that no root of the disk guard is a symbolic link on this machine. The guard follows none, so it
    would never delete a file there. Raises StartRefused."""
    for root in settings.fleet.disk.roots:
        if os.path.islink(root.path):
            raise StartRefused(
                f"fleet.disk.roots: {root.path} is a symbolic link, which the disk guard does not follow; "
                f"write its real path, {os.path.realpath(root.path)}"
            )


def batches_without_effect(settings: Settings) -> str:
    """Return a message about the parts of `triton.batch` that have no effect; empty if there are none."""
    triton = settings.triton
    named = ", ".join(sorted(triton.batch))
    if not triton.batch:
        return ""
    if not triton.servers:
        return f"triton.batch ({named}) has no effect: triton.servers names no server"
    if not triton.managed:
        return (
            f"triton.batch ({named}) joins queued inferences only: no server has a node, so the service "
            "loads no models, and direct requests are batched as the models' own dynamic_batching says"
        )
    return ""


def check_ray_access(settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
    """Check that the token and the certificates for a joined Ray can be read and fit together. They are
    named by settings or, as for Ray itself, in the environment. Without this check Ray would try for
    minutes. Raises StartRefused."""
    if settings.engine != "ray":
        return
    if "://" in (client := environment.get("RAY_ADDRESS", "")):
        raise StartRefused(
            f"RAY_ADDRESS: {client_server_refused(client)}. The service reads --ray or ray.address: write it "
            "there, and unset RAY_ADDRESS"
        )
    if not settings.ray.address:
        return
    token, tls = settings.ray.token_file, settings.ray.tls
    if token is not None:
        _check_readable("ray.token_file", token)
    if tls is not None:
        named = {f"ray.tls.{name}": Path(file) for name, file in structs.asdict(tls).items()}
    elif environment.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
        for name in names:
            if not environment.get(name):
                raise StartRefused(f"RAY_USE_TLS is set and {name} is not; name the file, or set ray.tls")
        named = {name: Path(environment[name]) for name in names}
    else:
        return
    for name, path in named.items():
        _check_readable(name, path)
    (_, certificate), (_, key), (_, ca) = named.items()
    try:
        context = ssl.create_default_context(cafile=ca)
        context.load_cert_chain(certificate, key, lambda: "")  # without it OpenSSL asks the terminal
    except ssl.SSLError as fault:
        raise StartRefused(
            f"{certificate}, {key} and {ca} ({', '.join(named)}) are not a certificate, its key without a "
            f"passphrase, and the CA's certificate, in PEM: {fault.reason or fault}"
        ) from None


def _check_readable(name: str, path: Path) -> None:
    """Check that the file has text and can be read. Raises StartRefused."""
    try:
        empty = not path.read_bytes()
    except OSError as error:
        raise StartRefused(
            f"{name}: cannot read {path}: {error.strerror}; create it, or give it to the service's user (uid "
            f"{os.geteuid()})"
        ) from None
    if empty:
        raise StartRefused(f"{name}: {path} is empty")


def check_gpus(settings: Settings, environment: Mapping[str, str] = os.environ) -> None:
    """Check that no GPU is named twice, because CUDA then shows none. Raises StartRefused."""
    named, by = settings.ray.gpus, "ray.gpus"
    if named is None and not settings.ray.address and VARIABLE in environment:
        named, by = tuple(environment[VARIABLE].split(",")), VARIABLE
    words = [word.strip() for word in named or ()]
    twice = sorted({word for word in words if word and words.count(word) > 1})
    if settings.engine == "ray" and not settings.simulated_devices and twice:
        raise StartRefused(
            f"{by} names {', '.join(twice)} twice, and CUDA shows no GPU to a process with such a list; name "
            "each GPU once"
        )


def check_task_surroundings(settings: Settings) -> None:
    """Check that `task_user` and `task_path` exist, if tasks run on this machine. Raises StartRefused."""
    if settings.ray.address or settings.engine != "ray":
        return
    if settings.task_user:
        try:
            pwd.getpwnam(settings.task_user)
        except KeyError:
            raise StartRefused(
                f"task_user: this machine has no user {settings.task_user!r}; create it, or name another"
            ) from None
    for path in settings.task_path:
        if not path.is_dir():
            raise StartRefused(
                f"task_path: {path} is not a directory; create it, or name the folder of the modules"
            )


def other_ray(own_executor: Mapping[str, Any], leader: LeaderSeen) -> str:
    """Return a message if this process uses another Ray than the leader, which says what to do; otherwise
    empty.

    All brokers on one database must use one Ray, because a broker can neither hear nor stop runs of another
    Ray. `own_executor` is the status of this process's executor. A local Ray is identified by its machine
    and data directory (`home`). A joined Ray may have several addresses, so the addresses of two joined ones
    are not compared.
    """
    leader_executor = leader.executor
    home, leaders = own_executor.get("home"), leader_executor.get("home")
    if home is None or leaders is None or home == leaders:
        return ""
    if not home and leader_executor.get("address") in ("", own_executor.get("address")):
        return ""
    own_ray = f"a local Ray of its own, {home}" if home else f"the Ray at {own_executor.get('address')}"
    leaders_ray = f"the local Ray of {leaders}" if leaders else f"the Ray at {leader_executor.get('address')}"
    return (
        f"this broker would use {own_ray}, and {leader.holder}, which leads on this database, uses "
        f"{leaders_ray}: what one of them starts, the other could neither hear nor end. Name one Ray for all "
        "of them with ray.address, give those on one machine one data_dir, or stop the other one first"
    )


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on this address. Raises StartRefused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        owner = port_owner(port)
        owner_text = f" ({owner})" if owner else ""
        raise StartRefused(
            f"cannot listen on {host}:{port}: {error.strerror}{owner_text}; "
            "stop that process, or choose another port with --port (0 takes a free one)"
        ) from None
    return listener


def allow_open_files(most_connections: int) -> None:
    """Raise the soft limit of open files, which is low on many systems for programs that use select()."""
    wanted = most_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        log.warning(
            "too few open files are allowed",
            fault=f"limits.connections needs {wanted} open files, and this process may have {hard}; "
            "raise its hard limit (LimitNOFILE, ulimit -Hn), or lower the setting",
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def own_host(bound: str) -> str:
    """Return the address by which clients on this machine connect."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bound, bound)  # noqa: S104  # nothing is bound here


def port_owner(port: int) -> str:
    """Return the process that listens on a port; empty if this user may not see it."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN
            if listens and getattr(connection.laddr, "port", None) == port and connection.pid:
                return f"process {connection.pid}, {psutil.Process(connection.pid).name()}"
    return ""


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600, which replaces an existing one in one step."""
    draft = path.with_name(path.name + ".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
