"""Whether this software may still use what is stored. Newer software may have changed it, while this runs."""

from gpubroker_server.ports.store import LogOutgrown, Outgrown

SCHEMA = 6
"""Number of the newest migration that this software knows."""

READER = 3
"""Newest form of events that this software can read. Whoever writes another one gives its events a higher
number, and one that old software understands keeps the number it has."""


def check_schema(compatible_from: int) -> None:
    """`compatible_from`: the oldest schema whose software may still use the database. Raises Outgrown."""
    if compatible_from > SCHEMA:
        raise Outgrown(
            f"the database has been changed for software of schema {compatible_from} and newer, and this is "
            f"of schema {SCHEMA}; upgrade this process"
        )


def check_reader(reader: int) -> None:
    """Raises LogOutgrown: whoever goes on past such an event has a wrong picture."""
    if reader > READER:
        raise LogOutgrown(
            f"the log has events of form {reader}, and this software reads forms up to {READER}; "
            "upgrade this process"
        )
