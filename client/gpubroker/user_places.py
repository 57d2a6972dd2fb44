"""The user of this process and the user's directories. The system may know neither the name nor the home."""

import os
from collections.abc import Mapping
from pathlib import Path


def state_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory in which programs keep their state; None if the user has no home directory."""
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state)
    home = home_directory(environ)
    return None if home is None else home / ".local" / "state"


def home_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's home directory; None if neither HOME nor the system says one."""
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path.home()
    except RuntimeError:
        return None


def expanded(path: Path) -> Path:
    """Return the path with its `~` replaced. Raises ValueError if the home directory is unknown."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError(
            f"{path} begins in a home directory that this system does not know (user id {os.geteuid()}); set "
            "HOME, or write the whole path"
        ) from None


def user_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the user's name, or `uid NUMBER` if neither the environment nor the system knows the name."""
    for variable in ("LOGNAME", "USER"):
        if name := environ.get(variable):
            return name
    import pwd  # asked only if the environment does not say it: some systems ask other machines

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"uid {os.geteuid()}"
