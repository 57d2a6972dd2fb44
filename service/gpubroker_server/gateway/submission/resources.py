"""Schema of what a task, or each rank of a gang, needs to run."""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    Field,
    GetPydanticSchema,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError, core_schema

from gpubroker_server.core.admission.defaults import LEARNED, GpuSize
from gpubroker_server.core.admission.roles import max_of_roles
from gpubroker_server.core.domain.ranks import MAX_RANKS
from gpubroker_server.http.bodies import Body, KindName, LabelKey, NodeLabels, line

MAX_MB: Final = 16_777_216
MAX_GPUS: Final = 1024

SizeMb = Annotated[int, Field(ge=1, le=MAX_MB)]
Kinds = Annotated[list[KindName], Field(max_length=32)]


def _size_or_learned(value: Any, read_size: ValidatorFunctionWrapHandler) -> Any:
    return value if value == LEARNED else read_size(value)


GpuMb = Annotated[
    GpuSize,
    # A plain union would answer a wrong number with two faults, one of which is about the word.
    GetPydanticSchema(
        lambda _, handler: core_schema.no_info_wrap_validator_function(_size_or_learned, handler(SizeMb))
    ),
    WithJsonSchema(
        {
            "description": "MiB of each device. `learned`: what earlier runs of the same model type (else "
            "name, else entrypoint) used, plus a margin; whole devices until enough of them were measured.",
            "anyOf": [
                {"type": "integer", "minimum": 1, "maximum": MAX_MB},
                {"type": "string", "const": LEARNED},
            ],
        }
    ),
]
Gpus = Annotated[int, Field(ge=0, le=MAX_GPUS)]
Cpu = Annotated[float, Field(ge=0, le=100_000)]
MemoryMb = Annotated[int, Field(ge=0, le=1_073_741_824)]
Custom = Annotated[dict[LabelKey, Annotated[float, Field(gt=0, le=1e9)]], Field(max_length=32)]


ProfileName = Annotated[
    str,
    line(100),
    Field(
        description="The role whose sizes and limits hold for what is left out; `GET /profiles` lists them. "
        "It goes before the defaults of `model_type`."
    ),
]


class Role(Body):
    """Resources of one role. A size that is left out is not needed."""

    gpus: Gpus | None = None
    gpu_mb: SizeMb | None = None
    gpu_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    cpu: Cpu | None = None
    memory_mb: MemoryMb | None = None
    custom: Custom = Field(default_factory=dict)


class Amounts(Body):
    """Resources of one process. Sizes are MiB; GPU sizes are per device."""

    gpu_mb: GpuMb | None = None
    gpus: Gpus | None = None
    gpu_fraction: (
        Annotated[float, Field(gt=0, le=1, description="Share of each device's memory, instead of `gpu_mb`.")]
        | None
    ) = None
    exclusive: Annotated[bool, Field(description="No other holder on the same devices.")] = False
    cpu: Annotated[Cpu, Field(description="Default: 0 for a task with GPUs, otherwise 1.")] | None = None
    memory_mb: Annotated[MemoryMb, Field(description="Default: 0.")] | None = None
    custom: Annotated[Custom, Field(description="Amounts of resources that the operator has named.")] = Field(
        default_factory=dict
    )

    kinds: Annotated[
        Kinds, Field(description="Only GPUs of one of these kinds.", examples=[["H100", "A100"]])
    ] = Field(default_factory=list)
    min_power: Annotated[int, Field(ge=0, le=1_000_000, description="Only kinds of this rank or above.")] = 0
    min_device_mb: Annotated[int, Field(ge=0, le=MAX_MB, description="Only GPUs of at least this size.")] = 0
    nodes: Annotated[
        NodeLabels,
        Field(
            description="Only nodes with one of the values of each label; the label `node` is the name.",
            examples=[{"zone": ["a", "b"]}],
        ),
    ] = Field(default_factory=dict)
    prefer_kinds: Annotated[
        Kinds, Field(description="Best first. A preference never keeps a task waiting.")
    ] = Field(default_factory=list)
    prefer_nodes: Annotated[NodeLabels, Field(description="Preferred nodes, in the form of `nodes`.")] = (
        Field(default_factory=dict)
    )

    @property
    def names_devices(self) -> bool:
        """True if the demand restricts which GPUs will do, and so asks for one."""
        return bool(self.kinds or self.min_power or self.min_device_mb)

    @property
    def wants_gpu(self) -> bool:
        return self.exclusive or self.gpu_mb is not None or self.gpu_fraction is not None

    @property
    def mentions_gpus(self) -> bool:
        """True if the body says how many GPUs or how much of a GPU the task needs. The defaults of its model
        type then do not apply."""
        return self.gpus is not None or self.wants_gpu

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self.check_agreement()
        return self

    def check_agreement(self) -> None:
        """Check that no two fields contradict each other. Raises PydanticCustomError."""
        if self.gpu_mb is not None and self.gpu_fraction is not None:
            raise PydanticCustomError("contradiction", "give gpu_mb or gpu_fraction, not both")
        if self.gpus == 0 and (self.wants_gpu or self.names_devices):
            raise PydanticCustomError(
                "contradiction",
                "gpus is 0, but gpu_mb, gpu_fraction, exclusive, kinds, min_power or min_device_mb asks for "
                "one; leave gpus out, and it becomes 1",
            )


class Bundle(Amounts):
    """Resources of one rank of a gang, or of each of `count` equal ranks."""

    profile: Annotated[
        ProfileName,
        Field(
            description="The profile whose sizes hold for what this bundle leaves out. Default: the task's."
        ),
    ] = ""
    count: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1


class Resources(Amounts):
    """Resources of a task or, with `bundles`, of each rank of a gang, all of which run at the same time.
    Sizes are MiB; GPU sizes are per device."""

    pool: Annotated[str, line(100), Field(description="Name of the pool that it uses.")] = ""
    roles: Annotated[
        dict[LabelKey, Role],
        Field(
            max_length=32,
            description="Instead of sizes: what each of several roles needs that take turns in one process, "
            "such as training and generating. The task gets the maximum of each size; it finds the names of "
            "the roles in GPUBROKER_ROLES.",
            examples=[{"train": {"gpu_mb": 40960}, "generate": {"gpu_mb": 20480, "cpu": 4}}],
        ),
    ] = Field(default_factory=dict)
    bundles: Annotated[
        list[Bundle],
        Field(
            max_length=MAX_RANKS,
            description="A gang: one process per rank, numbered in this order; all start or none. Beside the "
            "bundles give only what holds for all ranks: kinds, nodes and the other restrictions, and pool.",
            examples=[[{"count": 4, "gpus": 1}, {"cpu": 2}]],
        ),
    ] = Field(default_factory=list)
    strategy: Annotated[
        Literal["pack", "spread", "strict_pack", "strict_spread"],
        Field(
            description="How ranks are placed on nodes: on as few as possible, on as many as possible, all "
            "on one node, each on a node of its own."
        ),
    ] = "pack"
    min_ranks: (
        Annotated[int, Field(ge=1, le=MAX_RANKS, description="It can run with only this many first ranks.")]
        | None
    ) = None

    def with_sizes(self) -> "Resources":
        """Return the resources with the sizes that the roles add up to."""
        return self.model_copy(update=max_of_roles(self.roles.values())) if self.roles else self

    @property
    def mentions_gpus(self) -> bool:
        """True also for a gang, whose bundles say which GPUs they need."""
        return super().mentions_gpus or bool(self.bundles)

    def check_agreement(self) -> None:
        super().check_agreement()
        if self.roles:
            self._check_roles()
        if self.bundles:
            self._check_ranks()
        elif not self.model_fields_set.isdisjoint(_OF_A_GANG):
            raise PydanticCustomError("contradiction", "strategy and min_ranks are for bundles; give bundles")

    def _check_roles(self) -> None:
        if self.mentions_gpus or self.custom or (self.cpu, self.memory_mb) != (None, None):
            raise PydanticCustomError("contradiction", "give sizes or roles, not both: roles have the sizes")
        super(Resources, self.with_sizes()).check_agreement()

    def _check_ranks(self) -> None:
        ranks = sum(bundle.count for bundle in self.bundles)
        if self.model_fields_set & _OF_ONE_RANK:
            wrong = ", ".join(sorted(self.model_fields_set & _OF_ONE_RANK))
            raise PydanticCustomError(
                "contradiction", "{wrong} has no effect beside bundles; put it into them", {"wrong": wrong}
            )
        if ranks > MAX_RANKS:
            raise PydanticCustomError(
                "too_many_ranks", "{ranks} ranks; at most {most}", {"ranks": ranks, "most": MAX_RANKS}
            )
        if self.min_ranks is not None and self.min_ranks > ranks:
            raise PydanticCustomError(
                "contradiction", "min_ranks is above the {ranks} ranks", {"ranks": ranks}
            )


_OF_A_GANG = frozenset({"strategy", "min_ranks"})
_OF_ONE_RANK = {"gpus", "gpu_mb", "gpu_fraction", "exclusive", "cpu", "memory_mb", "custom"}

_NOTHING = Resources()
# pydantic makes a deep copy of a default that is a model, which was a third of all calls of a small submit.
# The value that a factory returns is not copied. Sharing one value is safe, because bodies are frozen.
NamedResources = Annotated[
    Resources,
    Field(
        default_factory=lambda: _NOTHING,
        json_schema_extra={"default": _NOTHING.model_dump(mode="json", exclude_none=True)},
    ),
]
"""The resources of a body that may leave them out."""
