"""All settings of the service; config.example.yaml explains each. The only reader of configuration files,
environment and flags.

Order, later wins: defaults, the file given by `--config` (or GPUBROKER_CONFIG), `<file>.local` beside it,
environment (`GPUBROKER_PORT`, `GPUBROKER_RAY__SPARES`; a few have short names, such as
`GPUBROKER_TARGET_UTIL_MIN`), flags, `--set NAME=VALUE`.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

import yaml
from gpubroker.user_places import state_directory
from gpubroker.wire.policy import GpuKind
from msgspec import Meta, Struct, field
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gpubroker_server.core.admission.claims import OidcIssuer
from gpubroker_server.core.admission.defaults import Defaults, NamedDefaults, Profile
from gpubroker_server.core.domain.device import SHIPPED_KINDS
from gpubroker_server.core.domain.limits import ServiceLimits
from gpubroker_server.core.domain.policy import Pool, Retention
from gpubroker_server.core.domain.setting_marks import HOME, WORDS, NonNegativeMib, by_name, check, prepare
from gpubroker_server.core.domain.submission import SECRET_PREFIX
from gpubroker_server.core.domain.suggestions import meant_field, nearest
from gpubroker_server.core.domain.units import Mib, Seconds
from gpubroker_server.core.lifecycle.reconcile import NodeRules
from gpubroker_server.settings.environments import EnvironmentSettings
from gpubroker_server.settings.fleet import SHORT_VARIABLES, FleetSettings
from gpubroker_server.settings.ray import RaySettings
from gpubroker_server.settings.sections import (
    PolicySettings,
    SimulatedDevice,
    kinds_over_the_shipped,
    profiles_over_the_shipped,
    shipped_profiles,
)
from gpubroker_server.settings.struct_models import WRITTEN_AS, Section, WithUnits, model_of, value_of
from gpubroker_server.settings.triton import TritonSettings
from gpubroker_server.settings.validation_text import text_of

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class SettingsRefused(Exception):
    """The configuration is wrong. The message names each wrong setting, its value and what to do."""


def default_data_dir() -> Path:
    """Return the directory in which the service keeps its files and the CLI looks for the token. Raises
    SettingsRefused if the user has no home directory and the environment names no data directory."""
    if given := os.environ.get("GPUBROKER_DATA_DIR"):
        return Path(given)
    state = state_directory()
    if state is None:
        raise SettingsRefused(
            f"data_dir is not set, and the user (id {os.geteuid()}) has no home directory to keep data in; "
            "name a directory with --data-dir, data_dir or GPUBROKER_DATA_DIR"
        )
    return state / "gpubroker"


def usual_data_dir() -> Path | None:
    """Return the data directory that clients of this user use by default; None if there is none."""
    try:
        return default_data_dir()
    except SettingsRefused:
        return None


def _patterns_name_functions(patterns: tuple[str, ...]) -> tuple[str, ...]:
    for pattern in patterns:
        if pattern.count(":") != 1:
            raise ValueError(f"{pattern!r} is not module:function; write that, or module:*")
    return patterns


def _is_path(given: str) -> str:
    if given and re.fullmatch(r"(?:/[A-Za-z0-9._~-]+){1,20}", given) is None:
        raise ValueError(f"{given!r} is not a path; write such as /gpubroker, without a slash at its end")
    return given


def _are_networks(given: tuple[str, ...]) -> tuple[str, ...]:
    for network in given:
        try:
            ip_network(network, strict=False)
        except ValueError:
            raise ValueError(
                f"{network!r} is neither an address nor a network; write such as 127.0.0.1 or 10.0.0.0/8"
            ) from None
    return given


def _task_env_is_plain(env: dict[str, str]) -> dict[str, str]:
    for name, text in env.items():
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None or "\0" in text:
            raise ValueError(f"{name!r}: a variable has a name of letters, digits and _, and no NUL in it")
        if text.startswith(SECRET_PREFIX):
            raise ValueError(
                f"{name} names a secret, which belongs to a tenant; have its tasks name it in their env"
            )
    return env


Words = Annotated[tuple[str, ...], WORDS]


class Settings(Struct, frozen=True, kw_only=True):
    data_dir: Annotated[Path, HOME] = field(default_factory=default_data_dir)
    database_url: str = ""
    database_notify: bool = True
    database_may_lose_commits: bool = False
    blob_dir: Annotated[Path, HOME] | None = None
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8470
    allowed_hosts: Words = ()
    root_path: Annotated[str, check(_is_path)] = ""
    trusted_proxies: Annotated[Words, check(_are_networks)] = ()
    entrypoints: Annotated[Words, check(_patterns_name_functions)] = ()
    env_allowed: Words = ()
    task_env: Annotated[Mapping[str, str], check(_task_env_is_plain)] = field(default_factory=dict)
    task_path: Annotated[tuple[Path, ...], WORDS] = ()
    engine: Literal["ray", "simulated"] = "ray"
    task_user: str = ""
    device_reserve_mb: NonNegativeMib = Mib(0)
    declared_foreign_mb: Mapping[str, NonNegativeMib] = field(default_factory=dict)
    environments: EnvironmentSettings = EnvironmentSettings()
    simulated_devices: tuple[SimulatedDevice, ...] = ()
    submit_from_tasks: bool = False
    tasks_url: str = ""
    drain_seconds: Annotated[Seconds, Meta(ge=2, le=3600)] = Seconds(20.0)
    drain_notice_seconds: Annotated[Seconds, Meta(ge=0)] = Seconds(0.0)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["console", "json"] = "console"
    access_log: bool = False
    oidc: tuple[OidcIssuer, ...] = ()
    extensions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ray: RaySettings = RaySettings()
    fleet: FleetSettings = field(default_factory=FleetSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    limits: ServiceLimits = ServiceLimits()
    retention: Retention = Retention()
    triton: TritonSettings = field(default_factory=TritonSettings)
    defaults: Defaults = field(default_factory=Defaults)
    kinds: Annotated[tuple[GpuKind, ...], by_name(alone="power"), prepare(kinds_over_the_shipped)] = tuple(
        sorted(SHIPPED_KINDS)
    )
    nodes: Mapping[str, NodeRules] = field(default_factory=dict)
    pools: Annotated[tuple[Pool, ...], by_name()] = ()
    model_types: Mapping[str, NamedDefaults] = field(default_factory=dict)
    profiles: Annotated[Mapping[str, Profile], prepare(profiles_over_the_shipped)] = field(
        default_factory=shipped_profiles
    )

    def __post_init__(self) -> None:
        """Refuse settings of different sections that contradict each other. Raises ValueError."""
        if self.tasks_url and not self.tasks_url.startswith(("http://", "https://")):
            raise ValueError(f"tasks_url {self.tasks_url!r} must begin with http:// or https://")
        if self.submit_from_tasks and self.ray.address and not self.tasks_url:
            raise ValueError(
                "submit_from_tasks needs tasks_url with ray.address: the address at which tasks on the nodes "
                "of the cluster reach a gateway, such as https://gpubroker.lab"
            )
        if self.drain_notice_seconds > self.drain_seconds - 2:
            raise ValueError(
                f"drain_notice_seconds ({self.drain_notice_seconds:g}) must be at least 2 less than "
                f"drain_seconds ({self.drain_seconds:g}), so that requests can be answered"
            )
        self._check_pools()

    def _check_pools(self) -> None:
        for pool in self.pools:
            known_limits = {limit.name for limit in self.policy.custom_limits}
            for resource in sorted(pool.custom.keys() - known_limits):
                raise ValueError(
                    f"pools.{pool.name}.custom names {resource!r}, which is not in policy.custom_limits; set "
                    "its amount there"
                )
        names = sorted(pool.name for pool in self.pools)
        for target in self.fleet.targets:
            scope = target.scope
            if scope.kind == "pool" and scope.name not in names:
                raise ValueError(
                    f"fleet.targets names pool {scope.name!r}; pools are {', '.join(names) or 'none'}: "
                    "add it, or name one of them"
                )

    @property
    def objects(self) -> Path:
        return self.blob_dir or self.data_dir / "blobs"

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'gpubroker.db'}"


class _Sources(WithUnits, BaseSettings):
    """Reads the settings from flags, environment and files."""

    model_config = SettingsConfigDict(
        env_prefix="GPUBROKER_",
        env_nested_delimiter="__",
        validate_default=False,  # the Structs know the defaults
        extra="forbid",
        frozen=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return the sources in their precedence: flags, then the environment, then the files passed as
        `_files`."""
        flags = dict(init_settings())
        files = flags.pop("_files", {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=flags),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=_short_variables()),
            InitSettingsSource(settings_cls, init_kwargs=files),
        )


@cache
def settings_model() -> type[BaseModel]:
    """Return the model of all settings. It is made when settings are first read, not at import."""
    return model_of(Settings, _Sources)


class GivenSetting(NamedTuple):
    path: tuple[str, ...]
    value: Any
    origin: str
    """The flag, variable or file that has the value."""


def load_settings(config: Path | None = None, *, sets: Sequence[str] = (), **flags: Any) -> Settings:
    """Read all sources. Flags that are None count as not given, and `sets` has the texts of `--set`. Raises
    SettingsRefused."""
    sources = _read_sources(config, sets, flags)
    given = _merge(sources.flags, sources.sets)
    merged: dict[str, Any] = {}
    for tree in sources.files.values():
        merged = _merge(merged, tree)
    wrong = list(_misspelled_variables())
    if config is not None and "data_dir" not in given:
        wrong += _two_data_dirs(config, merged)
    try:
        settings: Settings = value_of(Settings, settings_model()(_files=merged, **given))
    except ValidationError as refused:
        wrong += [_fault_text(fault, _origin(fault["loc"], sources)) for fault in refused.errors()]
    except ValueError as contradiction:
        wrong.append(str(contradiction))
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise SettingsRefused(f"wrong settings:{lines}\nevery setting is in config.example.yaml")
    return settings


def given_settings(
    config: Path | None = None, *, sets: Sequence[str] = (), **flags: Any
) -> Iterator[GivenSetting]:
    """Yield the settings that some source has, each with the value and the source that hold; entries of lists
    and maps belong to their setting. The arguments are those of `load_settings`, which must accept them.
    Raises SettingsRefused."""
    sources = _read_sources(config, sets, flags)
    values: dict[tuple[str, ...], Any] = {}
    trees = [*sources.files.values(), _short_variables(), _variables(), sources.flags, sources.sets]
    for tree in trees:
        values |= _settings_in(tree, settings_model())
    for path, value in values.items():
        yield GivenSetting(path, value, _origin(path, sources))


def _settings_in(
    tree: Mapping[str, Any], section: type[BaseModel], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in tree.items():
        info = section.model_fields.get(name)
        inner = None if info is None else _own_section(info.annotation)
        if inner is not None and isinstance(value, Mapping):
            yield from _settings_in(value, inner, (*path, name))
        else:
            yield (*path, name), value


def _own_section(annotation: Any) -> type[BaseModel] | None:
    """Return the section that a field holds; None for a field with a value, a list or a map."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


class _Given(NamedTuple):
    """The sources apart from the environment, each as it was written."""

    files: Mapping[str, dict[str, Any]]
    """Maps paths to contents. A later file wins."""
    flags: dict[str, Any]
    sets: dict[str, Any]


def _read_sources(config: Path | None, sets: Sequence[str], flags: Mapping[str, Any]) -> _Given:
    named = config or (Path(path) if (path := os.environ.get("GPUBROKER_CONFIG")) else None)
    given = {name: value for name, value in flags.items() if value is not None}
    return _Given(_read_files(named), given, _tree_of(sets))


def _tree_of(sets: Sequence[str]) -> dict[str, Any]:
    """Return the settings of texts such as `limits.body_bytes=16MiB`, whose values are YAML. Raises
    SettingsRefused."""
    tree: dict[str, Any] = {}
    for text in sets:
        name, mark, value = text.partition("=")
        *sections, last = name.split(".")
        if not mark or not all((*sections, last)):
            raise SettingsRefused(f"--set {text!r}: write NAME=VALUE, such as limits.body_bytes=16MiB")
        try:
            part: Any = {last: yaml.safe_load(value)}
        except yaml.YAMLError:
            raise SettingsRefused(f"--set {text!r}: the value is not YAML; put it in quotes") from None
        for section in reversed(sections):
            part = {section: part}
        tree = _merge(tree, part)
    return tree


def _variables() -> dict[str, Any]:
    """Return the settings that variables of the environment set, as texts."""
    tree: dict[str, Any] = {}
    for variable, text in os.environ.items():
        path = variable.removeprefix(_PREFIX).lower().split("__")
        if variable.startswith(_PREFIX) and path[0] in Settings.__struct_fields__:
            part: Any = yaml.safe_load(text) if text.startswith("{") else text
            for name in reversed(path):
                part = {name: part}
            tree = _merge(tree, part)
    return tree


def _fault_text(fault: ErrorDetails, origin: str) -> str:
    """Return a message about a fault: the setting, what is wrong, the value, and where it was written."""
    path, found = fault["loc"], fault["input"]
    text = text_of(fault)
    match fault["type"]:
        case "extra_forbidden":
            text = f"there is no such setting{_remedy(str(path[-1]), _section_at(path[:-1]))}"
        case "missing":
            text = "is required"
        case "model_type":
            text = f"must hold settings by name; found {found!r}"
        case "value_error":
            pass  # our own text, which names what was found
        case "int_parsing" | "int_type" | "float_parsing" | "float_type" if unit := _unit_of(path):
            text = f"must be {unit}; found {found!r}"
        case _:
            text = f"{text}; found {found!r}"
    name = ".".join(str(part) for part in path)
    return (f"{name}: " if name else "") + text + (f" (in {origin})" if origin else "")


def _unit_of(path: Sequence[int | str]) -> str:
    """Return the text about what may be written for the setting at `path`; empty if its name has no unit."""
    named = next((str(part) for part in reversed(path) if str(part).endswith(tuple(WRITTEN_AS))), "")
    return next((text for ending, text in WRITTEN_AS.items() if named.endswith(ending)), "")


def _section_at(path: Sequence[int | str]) -> type[BaseModel]:
    section = settings_model()
    for part in path:  # names of settings, and names that the operator has chosen
        if part in section.model_fields:
            section = next(_sections_in(section.model_fields[str(part)].annotation), section)
    return section


def _sections_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections_in(inner)


_RENAMED: Final = {"node_labels": "nodes.NAME.labels"}


def _remedy(name: str, section: type[BaseModel]) -> str:
    """Return the new name of a setting, its place in another section, or the most similar name of this
    section."""
    if section is settings_model() and name in _RENAMED:
        return f'; it is now "{_RENAMED[name]}"'
    inner = {
        field: list(home.model_fields)
        for field, info in section.model_fields.items()
        if isinstance(home := info.annotation, type) and issubclass(home, Section)
    }
    return f"; {meant_field(name, list(section.model_fields), inner)}"


def _origin(path: Sequence[int | str], sources: _Given) -> str:
    """Return the flag, variable or file that has the value; empty if none has."""
    if not path:
        return ""
    if _has_value(sources.sets, path):
        return f"--set {'.'.join(map(str, path))}"
    if _has_value(sources.flags, path):
        return f"--{path[0]}".replace("_", "-")
    short = [name for name, setting in SHORT_VARIABLES.items() if setting == path]
    if variables := [variable for name in short if (variable := _PREFIX + name.upper()) in os.environ]:
        return variables[0]
    for length in range(len(path), 0, -1):
        variable = _PREFIX + "__".join(str(part) for part in path[:length]).upper()
        if variable in os.environ:
            return variable
    # The path of a fault may end in names that only pydantic knows, such as a type of a union.
    for known in (path, path[:2]):
        for file in reversed(list(sources.files)):
            if _has_value(sources.files[file], known):
                return file
    return ""


def _has_value(tree: Any, path: Sequence[int | str]) -> bool:
    for part in path:
        if isinstance(tree, dict):
            if part not in tree:
                return False
            tree = tree[part]
    return True


def _short_variables() -> dict[str, Any]:
    """Return the settings that variables with short names set."""
    settings: dict[str, dict[str, Any]] = {}
    for name, (section, setting) in SHORT_VARIABLES.items():
        if (value := os.environ.get(_PREFIX + name.upper())) is not None:
            settings.setdefault(section, {})[setting] = f"{value}GiB" if name.endswith("_gb") else value
    return settings


def _misspelled_variables() -> Iterator[str]:
    """Yield a message about each variable whose name is similar to one of the service. Others with this
    prefix may belong to other programs."""
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX).lower()
        is_unknown = variable.startswith(_PREFIX) and "__" not in name and name not in _VARIABLES
        if is_unknown and (suggestion := nearest(name, _VARIABLES, cutoff=0.8)):
            yield f"{variable}: there is no such variable; did you mean {_PREFIX}{suggestion.upper()}?"


def _two_data_dirs(config: Path, files: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message if the file that was named for this command and the variable name different data
    directories. The variable would win, and the command would work on the data of another service, for whose
    clients it was set."""
    from_file, from_environment = files.get("data_dir"), os.environ.get(_DATA_DIR)
    if (
        from_file
        and from_environment
        and os.path.expanduser(str(from_file)) != os.path.expanduser(from_environment)
    ):  # Path's raises
        yield (
            f"data_dir: {config} says {from_file}, and {_DATA_DIR} says {from_environment}; unset the "
            "variable, or say which one with --data-dir"
        )


_PREFIX: Final = "GPUBROKER_"
_DATA_DIR: Final = "GPUBROKER_DATA_DIR"
_VARIABLES: Final = (*Settings.__struct_fields__, *SHORT_VARIABLES, "config", "url", "token")
"""The names of variables after the prefix: settings, the configuration file, and variables of clients."""


def _read_files(config: Path | None) -> dict[str, dict[str, Any]]:
    """Return the contents of the configuration files by path. A later file wins."""
    if config is None:
        return {}
    local = config.with_name(config.name + ".local")
    return {str(path): _read_yaml(path) for path in (config, local) if path == config or path.exists()}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsRefused(f"cannot read {path}: {error.strerror}; name another with --config") from None
    except yaml.YAMLError as error:
        raise SettingsRefused(f"{path} is not YAML: {error}") from None
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise SettingsRefused(f"{path} must hold settings by name, as config.example.yaml does")
    return read


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        known = merged.get(name)
        merged[name] = _merge(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return merged
