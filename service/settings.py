"""Every knob of the service, once. The only reader of configuration files, environment and flags.

Order, later wins: defaults, the file given by `--config` (or GPUBROKER_CONFIG), `<file>.local` beside it,
environment (`GPUBROKER_PORT`, `GPUBROKER_RAY__SPARES`), flags.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from service.core.policy import BAND_NAMES

LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


class SettingsRefused(Exception):
    """The configuration is wrong; the text names each setting, its value and what to do."""


def default_data_dir() -> Path:
    """Where the service keeps its database, blobs and tokens: the place the CLI looks in, too."""
    if given := os.environ.get("GPUBROKER_DATA_DIR"):
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "gpubroker"


def _words(value: Any) -> Any:
    """The environment gives lists as comma-separated words; anything else is left as it is."""
    if not isinstance(value, str):
        return value
    return [word.strip() for word in value.split(",") if word.strip()]


def _band_value(value: Any) -> Any:
    if not isinstance(value, str) or value.isdecimal():
        return value
    if value not in BAND_NAMES:
        raise ValueError(f"should be 0 to 100 or one of {', '.join(BAND_NAMES)}; found {value!r}")
    return BAND_NAMES[value]


Words = Annotated[list[str], NoDecode, BeforeValidator(_words)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SimulatedDevice(Section):
    """Devices that exist only in the ledger: for trying things out, and for tests."""

    kind: str = "simulated"
    memory_mb: Annotated[int, Field(gt=0, le=4_194_304)]
    count: Annotated[int, Field(gt=0, le=1024)] = 1


class RaySettings(Section):
    address: str = ""
    """`host:port` of a cluster to join; empty starts a local Ray."""
    node_name: str = "local"
    cluster: str = "local"
    spares: Annotated[int, Field(ge=0, le=64)] = 2
    """Blank processes kept ready per node, so that no start waits for a fresh one."""
    warm_runners: Annotated[int, Field(ge=0, le=64)] = 1
    """Processes per node that small tasks without GPU share."""
    cpu: Annotated[float, Field(gt=0)] | None = None
    """CPUs a node offers; empty: what it has."""
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    max_runs: Annotated[int, Field(gt=0)] = 256
    """How many runs may be on one node at once, however small."""
    object_store_mb: Annotated[int, Field(ge=75)] = 128
    idle_stop_seconds: Annotated[float, Field(gt=0)] = 600.0
    """A local Ray without a broker and without runs stops by itself after so long."""

    inherit_env: Words = []
    """Names of the service's environment variables that tasks get too."""


class CustomSettings(Section):
    """A custom resource: how much there is of it, and for whom."""

    limit: Annotated[float, Field(ge=0)]
    per: Literal["cluster", "node"] = "cluster"
    """Of `node`, each node has so much."""
    priority_threshold: Annotated[int, Field(ge=0, le=100), BeforeValidator(_band_value)] = 0
    """Tasks of lower priority are given none."""


def _limit_alone(value: Any) -> Any:
    """A number is the amount that the cluster has in all."""
    return {"limit": value} if isinstance(value, int | float | str) else value


class MaximumSettings(Section):
    """The most that one task may ask for; what is left out is not limited."""

    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_mb: Annotated[int, Field(gt=0)] | None = None
    """MiB per GPU. Whole GPUs and shares are not given then: they differ from GPU to GPU."""
    cpu: Annotated[float, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None


class PolicySettings(Section):
    ageing_seconds_per_point: Annotated[float, Field(gt=0)] = 60.0
    preemption: bool = True
    preemption_budget: Annotated[int, Field(ge=0)] = 3
    shield_seconds: Annotated[float, Field(ge=0)] = 600.0
    pledge_patience_seconds: Annotated[float, Field(gt=0)] = 10.0
    kill_patience_seconds: Annotated[float, Field(gt=0)] = 10.0
    sample_period_seconds: Annotated[float, Field(gt=0)] = 2.0
    retry_first_seconds: Annotated[float, Field(gt=0)] = 1.0
    retry_factor: Annotated[float, Field(ge=1)] = 2.0
    retry_cap_seconds: Annotated[float, Field(gt=0)] = 300.0
    learned_margin: Annotated[float, Field(ge=0, le=10)] = 0.15
    """What a learned size has beyond what 95 of 100 runs used at most, as a share of that."""
    learned_least_runs: Annotated[int, Field(ge=1, le=1000)] = 5
    overuse: Literal["report", "stop"] = "report"
    """What becomes of a run that uses more of a GPU than it leased."""
    overuse_tolerance: Annotated[float, Field(ge=0, le=10)] = 0.05
    """So much more than its lease, as a share of it, a run may use."""
    custom_limits: dict[str, Annotated[CustomSettings, BeforeValidator(_limit_alone)]] = {}
    """Amounts of custom resources, by name."""
    maximum: MaximumSettings = MaximumSettings()


class LimitSettings(Section):
    body_bytes: Annotated[int, Field(gt=0)] = 8 * 1024 * 1024
    inline_bytes: Annotated[int, Field(gt=0)] = 64 * 1024
    """Arguments and results up to this size stay in the row; larger ones become blobs."""
    result_bytes: Annotated[int, Field(gt=0)] = 64 * 1024 * 1024
    checkpoint_bytes: Annotated[int, Field(gt=0)] = 16 * 1024 * 1024
    """Larger checkpoints are kept by the task itself, which hands over a URI."""
    stale_seconds: Annotated[float, Field(gt=0)] = 30.0
    """Overviews older than this are refused with 503."""


class DefaultSettings(Section):
    """What a submit that leaves it out gets."""

    priority: Annotated[int, Field(ge=0, le=100), BeforeValidator(_band_value)] = BAND_NAMES["batch"]
    """A number, or the name of a band, which stands for its middle."""
    cpu: Annotated[float, Field(ge=0)] = 1.0
    """For tasks without a GPU; those with one take none unless they say so."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 0
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0


class ModelTypeSettings(Section):
    """What a submit that names this model type and leaves it out gets."""

    priority: Annotated[int, Field(ge=0, le=100), BeforeValidator(_band_value)] | None = None
    gpu_mb: Annotated[int, Field(gt=0)] | None = None
    """Only for a submit that says nothing of GPUs."""
    cpu: Annotated[float, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    max_retries: Annotated[int, Field(ge=0, le=100)] | None = None


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix="GPUBROKER_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
    )

    data_dir: Path = Field(default_factory=default_data_dir)
    """Database, blobs, tokens and state files; created with mode 0700."""
    database_url: str = ""
    """`sqlite:///path` or `postgresql://user@host/name`; empty: gpubroker.db in the data directory."""
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8470
    """0 takes a free port."""
    allowed_hosts: Words = []
    """Names, besides loopback ones, under which clients may address the service (its Host check)."""
    entrypoints: Words = []
    """Patterns of `module:function` that tasks may name, such as `myteam.training:*` (here `*` is no dot)."""
    task_path: Annotated[list[Path], NoDecode, BeforeValidator(_words)] = []
    """Directories from which tasks import their modules; empty: where the service was started."""
    engine: Literal["ray", "simulated"] = "ray"
    """`simulated` runs nothing: a task only waits `kwargs.seconds` on a node that exists in memory."""
    task_user: str = ""
    """System user that tasks run as when the service runs as root; it must exist on every node."""
    device_reserve_mb: Annotated[int, Field(ge=0)] = 0
    """MiB of each device that are never leased."""
    declared_foreign_mb: dict[str, Annotated[int, Field(ge=0)]] = {}
    """MiB of each GPU that processes outside this service use, by node or by kind of GPU; a node's wins."""
    simulated_devices: list[SimulatedDevice] = []
    """Instead of the GPUs found by NVML."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["console", "json"] = "console"
    ray: RaySettings = RaySettings()
    policy: PolicySettings = PolicySettings()
    limits: LimitSettings = LimitSettings()
    defaults: DefaultSettings = DefaultSettings()
    model_types: dict[str, ModelTypeSettings] = {}
    """Defaults by `model_type`; they win over `defaults`."""

    @field_validator("data_dir")
    @classmethod
    def _home_is_expanded(cls, path: Path) -> Path:
        return path.expanduser()

    @field_validator("entrypoints")
    @classmethod
    def _patterns_name_functions(cls, patterns: list[str]) -> list[str]:
        for pattern in patterns:
            if pattern.count(":") != 1:
                raise ValueError(f"{pattern!r} is no entrypoint pattern; write module:function or module:*")
        return patterns

    @model_validator(mode="after")
    def _bind_rule(self) -> "Settings":
        if self.host not in LOOPBACK and not self.allowed_hosts:
            raise ValueError(
                f"host {self.host!r} is reachable from other machines; name the host names clients use "
                "in allowed_hosts (and put TLS in front), or bind 127.0.0.1"
            )
        host, _, port = self.ray.address.rpartition(":")
        if self.ray.address and (not host or "//" in host or not port.isdigit()):
            raise ValueError(
                f"ray.address {self.ray.address!r} is not the address of a Ray head; give host:6379 (not the "
                "ray:// address of a client server)"
            )
        return self

    @property
    def database(self) -> str:
        return self.database_url or f"sqlite:///{self.data_dir / 'gpubroker.db'}"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags win over environment, environment over the files handed in as `_files`."""
        flags = dict(init_settings())
        files = flags.pop("_files", {})
        return (
            InitSettingsSource(settings_cls, init_kwargs=flags),
            env_settings,
            InitSettingsSource(settings_cls, init_kwargs=files),
        )


def load_settings(config: Path | None = None, **flags: Any) -> Settings:
    """Read all sources. Flags that are None count as not given. Raises SettingsRefused."""
    given = {name: value for name, value in flags.items() if value is not None}
    named = config or (Path(path) if (path := os.environ.get("GPUBROKER_CONFIG")) else None)
    files = _read_files(named)
    merged: dict[str, Any] = {}
    for tree in files.values():
        merged = _merge(merged, tree)
    wrong = list(_misspelled_variables())
    try:
        settings = Settings(_files=merged, **given)  # type: ignore[call-arg]  # see the sources above
    except ValidationError as refused:
        wrong += [_told(fault, _origin(fault["loc"], given, files)) for fault in refused.errors()]
    if wrong:
        lines = "".join(f"\n  {line}" for line in wrong)
        raise SettingsRefused(f"wrong settings:{lines}\nevery setting is in config.example.yaml")
    return settings


def _told(fault: ErrorDetails, origin: str) -> str:
    """One fault in words: which setting, what is wrong with it, what was found, and where."""
    path, found = fault["loc"], fault["input"]
    said = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    match fault["type"]:
        case "extra_forbidden":
            said = f"there is no such setting{_remedy(str(path[-1]), _section_at(path[:-1]))}"
        case "missing":
            said = "is required"
        case "model_type":
            said = f"should hold settings by name; found {found!r}"
        case "value_error":
            pass  # our own words, which name what was found
        case _:
            said = f"{said}; found {found!r}"
    name = ".".join(str(part) for part in path)
    return (f"{name}: " if name else "") + said + (f" (in {origin})" if origin else "")


def _section_at(path: Sequence[int | str]) -> type[BaseModel]:
    section: type[BaseModel] = Settings
    for part in path:
        if isinstance(part, str):
            annotation = section.model_fields[part].annotation
            inner = (annotation, *get_args(annotation))
            section = next(one for one in inner if isinstance(one, type) and issubclass(one, BaseModel))
    return section


def _remedy(name: str, section: type[BaseModel]) -> str:
    """The same setting in the section where it belongs, or the nearest one of this section."""
    for inner, field in section.model_fields.items():
        home = field.annotation
        if isinstance(home, type) and issubclass(home, Section) and name in home.model_fields:
            return f'; did you mean "{inner}.{name}"?'
    near = get_close_matches(name, section.model_fields, n=1)
    return f'; did you mean "{near[0]}"?' if near else f"; known are {', '.join(section.model_fields)}"


def _origin(path: Sequence[int | str], flags: Mapping[str, Any], files: dict[str, Any]) -> str:
    """Where a setting's value came from: the flag, the variable or the file; empty if none holds it."""
    if not path:
        return ""
    if path[0] in flags:
        return f"--{path[0]}".replace("_", "-")
    for length in range(len(path), 0, -1):
        variable = _PREFIX + "__".join(str(part) for part in path[:length]).upper()
        if variable in os.environ:
            return variable
    return next((file for file, tree in reversed(files.items()) if _holds(tree, path[:2])), "")


def _holds(tree: Any, path: Sequence[int | str]) -> bool:
    for part in path:
        if isinstance(tree, dict):
            if part not in tree:
                return False
            tree = tree[part]
    return True


def _misspelled_variables() -> Iterator[str]:
    """Variables that nobody reads and that look like one of ours; others may belong to somebody else."""
    for variable in os.environ:
        name = variable.removeprefix(_PREFIX).lower()
        if variable.startswith(_PREFIX) and "__" not in name and name not in _VARIABLES:
            for meant in get_close_matches(name, _VARIABLES, n=1, cutoff=0.8):
                yield f"{variable}: there is no such variable; did you mean {_PREFIX}{meant.upper()}?"


_PREFIX: Final = "GPUBROKER_"
_VARIABLES: Final = (*Settings.model_fields, "config", "url", "token")
"""Names of ours behind the prefix: the settings, the file that holds them, and what clients read."""


def _read_files(config: Path | None) -> dict[str, dict[str, Any]]:
    """What each file says, by its path; later ones win."""
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
