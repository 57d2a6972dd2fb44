"""What was uploaded, as a table for people."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from gpubroker.cli.layout import Column, Rows, ago, moment, size_of_bytes
from gpubroker.models.objects import StoredObject

_COLUMNS = (Column("ID", share=0.45), Column("SIZE"), Column("CREATED"), Column("KEPT UNTIL"))


def objects(listed: Sequence[StoredObject]) -> RenderableType:
    rows = [
        (kept.id, size_of_bytes(kept.size_bytes), ago(kept.created_at), moment(kept.expires_at))
        for kept in listed
    ]
    return Rows(_COLUMNS, rows) if rows else Text("no objects")
