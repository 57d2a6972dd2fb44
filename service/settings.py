"""Every knob of the service, once. The only reader of configuration files, environment and flags.

Order, later wins: defaults, the file given by `--config` (or GPUBROKER_CONFIG), `<file>.local` beside it,
environment (`GPUBROKER_PORT`, `GPUBROKER_RAY__SPARES`), flags.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

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
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

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
    custom_limits: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Cluster-wide amounts of custom resources, by name."""


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

    priority: Annotated[int, Field(ge=0, le=100)] = 50
    cpu: Annotated[float, Field(ge=0)] = 1.0
    """For tasks without a GPU; those with one take none unless they say so."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 0
    grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0


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
    """System user that tasks run as when the service runs as root."""
    device_reserve_mb: Annotated[int, Field(ge=0)] = 0
    """MiB of each device that are never leased."""
    simulated_devices: list[SimulatedDevice] = []
    """Instead of the GPUs found by NVML."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["console", "json"] = "console"
    ray: RaySettings = RaySettings()
    policy: PolicySettings = PolicySettings()
    limits: LimitSettings = LimitSettings()
    defaults: DefaultSettings = DefaultSettings()

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
    try:
        return Settings(_files=_read_files(named), **given)  # type: ignore[call-arg]  # see the sources above
    except ValidationError as refused:
        lines = [
            f"  {'.'.join(str(part) for part in fault['loc']) or 'settings'}: {fault['msg']}"
            + (f" (found {fault['input']!r})" if fault["loc"] else "")
            for fault in refused.errors()
        ]
        hint = "every setting is in config.example.yaml"
        raise SettingsRefused("wrong settings:\n" + "\n".join(lines) + f"\n{hint}") from None


def _read_files(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    merged = _read_yaml(config)
    local = config.with_name(config.name + ".local")
    return _merge(merged, _read_yaml(local)) if local.exists() else merged


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
