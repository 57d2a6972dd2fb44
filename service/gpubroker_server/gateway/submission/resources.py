"""What a task, or each rank of a gang, needs to run."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from gpubroker_server.gateway.http.bodies import Body, LabelKey
from gpubroker_server.gateway.http.text import KindName, NodeLabels, line
from gpubroker_server.gateway.submission.gpu_size import GpuMb
from gpubroker_server.gateway.submission.roles import Role, most_of

MOST_RANKS = 256


class Amounts(Body):
    """What one process needs. Sizes are MiB; GPU sizes are per device."""

    gpu_mb: GpuMb | None = None
    gpus: Annotated[int, Field(ge=0, le=1024)] | None = None
    gpu_fraction: (
        Annotated[float, Field(gt=0, le=1, description="Share of each device's memory, instead of `gpu_mb`.")]
        | None
    ) = None
    exclusive: Annotated[bool, Field(description="No other holder on the same devices.")] = False
    cpu: (
        Annotated[
            float, Field(ge=0, le=100_000, description="Left out: 0 for a task with GPUs, otherwise 1.")
        ]
        | None
    ) = None
    memory_mb: Annotated[int, Field(ge=0, le=1_073_741_824, description="Left out: 0.")] | None = None
    custom: Annotated[
        dict[LabelKey, Annotated[float, Field(gt=0, le=1e9)]],
        Field(max_length=32, description="Amounts of resources that the operator named."),
    ] = Field(default_factory=dict)

    kinds: Annotated[
        list[KindName],
        Field(max_length=32, description="Only GPUs of one of these kinds.", examples=[["H100", "A100"]]),
    ] = Field(default_factory=list)
    min_power: Annotated[int, Field(ge=0, le=1_000_000, description="Only kinds of this rank or above.")] = 0
    min_device_mb: Annotated[
        int, Field(ge=0, le=16_777_216, description="Only GPUs with so much memory in all.")
    ] = 0
    nodes: Annotated[
        NodeLabels,
        Field(
            description="Only nodes with one of the values of each label; the label `node` is the name.",
            examples=[{"zone": ["a", "b"]}],
        ),
    ] = Field(default_factory=dict)
    prefer_kinds: Annotated[
        list[KindName],
        Field(max_length=32, description="Best first. A preference never keeps a task waiting."),
    ] = Field(default_factory=list)
    prefer_nodes: Annotated[NodeLabels, Field(description="As `nodes`, and no more than a wish.")] = Field(
        default_factory=dict
    )

    @property
    def names_devices(self) -> bool:
        """Asks for some GPUs and not for others, which is to ask for one."""
        return bool(self.kinds or self.min_power or self.min_device_mb)

    @property
    def wants_gpu(self) -> bool:
        return self.exclusive or self.gpu_mb is not None or self.gpu_fraction is not None

    @property
    def mentions_gpus(self) -> bool:
        """Says how many, or how much of them: whether it needs any is not left to its model type."""
        return self.gpus is not None or self.wants_gpu

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        self.check_agreement()
        return self

    def check_agreement(self) -> None:
        """Raises PydanticCustomError where two of its members contradict each other."""
        if self.gpu_mb is not None and self.gpu_fraction is not None:
            raise PydanticCustomError("contradiction", "give gpu_mb or gpu_fraction, not both")
        if self.gpus == 0 and (self.wants_gpu or self.names_devices):
            raise PydanticCustomError(
                "contradiction",
                "gpus is 0, but gpu_mb, gpu_fraction, exclusive, kinds, min_power or min_device_mb asks for "
                "one; leave gpus out: it becomes 1",
            )


class Bundle(Amounts):
    """What one rank of a gang asks for, or each of `count` that are alike."""

    count: Annotated[int, Field(ge=1, le=MOST_RANKS)] = 1


class Resources(Amounts):
    """What a task needs to run, or, with `bundles`, what each rank of a gang needs, all of which run at the
    same time. Sizes are MiB; GPU sizes are per device."""

    pool: Annotated[
        str, line(100), Field(description="The pool whose devices and amounts it uses, by name.")
    ] = ""
    roles: Annotated[
        dict[LabelKey, Role],
        Field(
            max_length=32,
            description="Instead of sizes: what each of several roles needs that take turns in one process, "
            "such as training and generating. The task asks for the most of each; it finds their names in "
            "GPUBROKER_ROLES.",
            examples=[{"train": {"gpu_mb": 40960}, "generate": {"gpu_mb": 20480, "cpu": 4}}],
        ),
    ] = Field(default_factory=dict)
    bundles: Annotated[
        list[Bundle],
        Field(
            max_length=MOST_RANKS,
            description="A gang: one process per rank, numbered in this order; all start or none. Beside "
            "them only what holds for all ranks may be said: kinds, nodes, their like, and pool.",
            examples=[[{"count": 4, "gpus": 1}, {"cpu": 2}]],
        ),
    ] = Field(default_factory=list)
    strategy: Annotated[
        Literal["pack", "spread", "strict_pack", "strict_spread"],
        Field(
            description="How ranks lie on nodes: on as few as may be, as many, all on one, each on its own."
        ),
    ] = "pack"
    min_ranks: (
        Annotated[
            int,
            Field(ge=1, le=MOST_RANKS, description="With so many of its ranks, the first ones, it runs too."),
        ]
        | None
    ) = None

    def settled(self) -> "Resources":
        """With the sizes that its roles come to."""
        return self.model_copy(update=most_of(self.roles.values())) if self.roles else self

    @property
    def mentions_gpus(self) -> bool:
        """Of a gang the ranks say it."""
        return super().mentions_gpus or bool(self.bundles)

    def check_agreement(self) -> None:
        super().check_agreement()
        if self.roles:
            self._check_roles()
        if self.bundles:
            self._check_ranks()
        elif not self.model_fields_set.isdisjoint(_OF_A_GANG):
            raise PydanticCustomError("contradiction", "strategy and min_ranks are for bundles; give those")

    def _check_roles(self) -> None:
        if self.mentions_gpus or self.custom or (self.cpu, self.memory_mb) != (None, None):
            raise PydanticCustomError("contradiction", "give sizes or roles, not both: roles have the sizes")
        super(Resources, self.settled()).check_agreement()

    def _check_ranks(self) -> None:
        ranks = sum(bundle.count for bundle in self.bundles)
        if self.model_fields_set & _OF_ONE_RANK:
            wrong = ", ".join(sorted(self.model_fields_set & _OF_ONE_RANK))
            raise PydanticCustomError(
                "contradiction", "beside bundles, {wrong} says nothing; put it into them", {"wrong": wrong}
            )
        if ranks > MOST_RANKS:
            raise PydanticCustomError(
                "too_many_ranks", "{ranks} ranks; at most {most}", {"ranks": ranks, "most": MOST_RANKS}
            )
        if self.min_ranks is not None and self.min_ranks > ranks:
            raise PydanticCustomError(
                "contradiction", "min_ranks is above the {ranks} ranks there are", {"ranks": ranks}
            )


_OF_A_GANG = frozenset({"strategy", "min_ranks"})
_OF_ONE_RANK = {"gpus", "gpu_mb", "gpu_fraction", "exclusive", "cpu", "memory_mb", "custom"}
