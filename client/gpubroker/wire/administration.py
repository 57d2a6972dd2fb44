"""Tokens, secrets, and the service's own condition."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from gpubroker.wire.answered import Answered, Time


class Grant(Struct, frozen=True):
    """The rights that a token grants, and their holder."""

    name: str
    tenant: str
    scopes: tuple[str, ...]
    max_priority: int


class Token(Grant, Answered, frozen=True):
    """A token, without its secret, which is not stored."""

    created_at: Time
    expires_at: Time | None


class NewToken(Token, frozen=True):
    """A token that was just created."""

    token: Annotated[str, Meta(description="The secret. Only this answer has it.")]

    def __repr__(self) -> str:
        return f"NewToken(name={self.name!r}, tenant={self.tenant!r}, scopes={self.scopes!r})"


class Secret(Answered, frozen=True):
    """A secret of a tenant, without its text."""

    name: str


class Health(Answered, frozen=True):
    status: Literal["ok"]


class Readiness(Answered, frozen=True):
    """The readiness of the process. Each part is `ok`, or begins with a word for its state.

    The process is also ready while `nodes` are `paused`, since all other nodes work, and while the `clock` is
    `contradicted`, since everything except pruning goes on.
    """

    status: Literal["ready", "not_ready"]
    parts: dict[str, str]


class Stopping(Answered, frozen=True):
    stopping: Literal[True]
    stop_cluster: bool
