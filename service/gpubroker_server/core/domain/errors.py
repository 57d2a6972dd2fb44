"""Errors of the program itself. What a client or the cluster did wrong is a refusal: a value, not an
exception."""


class CoreError(Exception):
    """A rule of the core was about to be broken; nothing was changed."""


class IllegalTransition(CoreError):
    """The transition table has no such move; the task or lease is unchanged."""


class Overcommitted(CoreError):
    """A draft was about to promise more memory than a device has."""


class OutOfSync(CoreError):
    """The event log and the World do not fit together; read the World again from the rows."""
