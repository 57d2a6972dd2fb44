"""Whether silent nodes are given up, as the API answers it."""

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from gpubroker_server.gateway.status.quarantine_views import Time


class DetectionView(TypedDict):
    """Whether silent nodes are given up, as the leader of this process sees it."""

    state: Annotated[str, Field(description="watching, or paused.")]
    since: Annotated[Time | None, Field(description="While paused.")]
    message: Annotated[str, Field(description="Why it is paused; empty otherwise.")]
    nodes: Annotated[list[str], Field(description="Silent, and not given up.")]
    runs: Annotated[int, Field(description="On these, and on those that were given up just before.")]
    of_runs: int
