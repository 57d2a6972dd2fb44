"""Mistakes of the program itself. What a client or a cluster did wrong is a refusal, which is a value."""


class CoreError(Exception):
    """A rule of the core was about to be broken; nothing was changed."""


class IllegalTransition(CoreError):
    """The table in `core.task` has no such move; the task is unchanged."""


class Overcommitted(CoreError):
    """A draft was about to promise more memory than a device has."""


class OutOfSync(CoreError):
    """The log and the picture made of it do not fit together; the picture must be read anew from rows."""
