"""Tasks of a batch that run after others of the same batch, which have no ids yet when they are written."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json, to_json

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.ids import is_task_id
from gpubroker_server.http.problems import Fault, Problem


class BatchReferences:
    """Puts ids in the place of indexes and names in `after`."""

    def __init__(self, texts: Sequence[bytes], ids: Sequence[TaskId]) -> None:
        self.named: set[TaskId] = set()
        """Tasks of this batch that others run after."""
        self._texts = texts
        self._ids = ids
        self._by_name: dict[str, list[int]] | None = None

    def resolved(self, number: int, made: Sequence[object]) -> bytes:
        """The text of a task with ids only. `made`: what became of those before it. Raises Problem."""
        text = self._texts[number]
        body = _object(text) if b'"after"' in text else {}
        after = body.get("after")
        if not isinstance(after, list):
            return text
        faults: list[Fault] = []
        has_changed = False
        for index, item in enumerate(after):
            wanted = item.get("task") if isinstance(item, dict) else item
            if isinstance(wanted, bool) or not isinstance(wanted, int | str) or is_task_id(str(wanted)):
                continue  # an id, or what validation refuses
            found = self._index_of(wanted, number)
            if isinstance(found, str) or isinstance(made[found], Problem):
                detail = found if isinstance(found, str) else f"task {found} of this batch was refused"
                faults.append(Fault(pointer=f"/after/{index}/task", detail=detail, code="unknown-task"))
                continue
            self.named.add(self._ids[found])
            after[index] = {**item, "task": self._ids[found]} if isinstance(item, dict) else self._ids[found]
            has_changed = True
        if faults:
            raise invalid(*faults)
        return to_json(body) if has_changed else text

    def _index_of(self, wanted: int | str, number: int) -> int | str:
        """Return the index of the wanted task, or a text that says what is wrong."""
        if isinstance(wanted, int):
            if 0 <= wanted < number:
                return wanted
            return f"{wanted} is not the index of a task before this one, which is task {number} of the batch"
        if self._by_name is None:
            self._by_name = {}
            for index, text in enumerate(self._texts):
                name = _object(text).get("name") if b'"name"' in text else None
                if isinstance(name, str) and name:
                    self._by_name.setdefault(name, []).append(index)
        earlier = [index for index in self._by_name.get(wanted, ()) if index < number]
        if len(earlier) == 1:
            return earlier[0]
        found = (
            f"{len(earlier)} tasks before this one in the batch have" if earlier else "no task before it has"
        )
        return f'"{wanted[:100]}" is no id, and {found} that name'


def _object(text: bytes) -> dict[str, Any]:
    """Return the object; empty if the text is none, which the validation reports."""
    try:
        found = from_json(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
