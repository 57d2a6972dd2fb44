"""Tokens of runs, with which a task submits other tasks. They are signed, are stored nowhere, and are valid
only while the run lasts."""

import base64
import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import NamedTuple

from gpubroker_server.core.domain.units import Fence, TaskId

PREFIX = "gpbrun_"
_KEY_BYTES = 32
_CODE = "code"


class RunOfToken(NamedTuple):
    task: TaskId
    fence: Fence
    brings_code: bool = False
    """True if the run's code came with its task, as a function, a command or an uploaded directory does."""


class RunTokens:
    """Makes and reads the tokens of runs: `gpbrun_<task>.<fence>.<HMAC-SHA256>`, with `code.` before the
    signature for a run whose code came with its task. A valid token does not prove that the run is still
    there; the caller must check that."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def token_of(self, run: RunOfToken) -> str:
        text = _signed_text(run)
        return f"{PREFIX}{text}.{self._signature(text)}"

    def run_of(self, token: str) -> RunOfToken | None:
        """Return the run of a token; None if the token was not made with this key."""
        text, _, signature = token.removeprefix(PREFIX).rpartition(".")
        task, fence, *marks = text.split(".") if text.count(".") in (1, 2) else ("", "")
        if not token.startswith(PREFIX) or not fence.isdecimal() or not token.isascii():
            return None
        run = RunOfToken(TaskId(task), Fence(int(fence)), marks == [_CODE])
        is_signed = text == _signed_text(run) and hmac.compare_digest(signature, self._signature(text))
        return run if is_signed else None

    def _signature(self, text: str) -> str:
        signed = hmac.new(self._key, text.encode(), hashlib.sha256).digest()
        return base64.b32encode(signed).decode().rstrip("=").lower()


def ray_token_of(key: bytes, task: TaskId, fence: Fence) -> str:
    """Return the token of the Ray cluster of one attempt. Every leader makes the same, so ranks that join
    late know it too. It opens nothing else."""
    return hmac.new(key, f"ray.{task}.{fence}".encode(), hashlib.sha256).hexdigest()


def _signed_text(run: RunOfToken) -> str:
    return f"{run.task}.{run.fence}" + (f".{_CODE}" if run.brings_code else "")


def key_at(path: Path) -> bytes:
    """Return the key in a file of mode 0600. The first process that calls this makes the file. Raises
    OSError."""
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            pass  # another process has made the file, and its key counts
        finally:
            draft.unlink()
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path} holds {len(key)} bytes and should hold {_KEY_BYTES}; remove it")
    return key
