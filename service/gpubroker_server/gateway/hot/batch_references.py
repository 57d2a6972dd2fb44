"""Resolves references between tasks of one batch: a client writes indexes or names, because ids do not exist
yet."""

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json, to_json

from gpubroker_server.core.domain.units import TaskId
from gpubroker_server.http.faults import invalid
from gpubroker_server.http.ids import is_task_id
from gpubroker_server.http.problems import Fault, Problem


class BatchReferences:
    """Replaces indexes and names in `after` by ids."""

    def __init__(self, texts: Sequence[bytes], ids: Sequence[TaskId]) -> None:
        self.named: set[TaskId] = set()
        """The tasks of this batch that other tasks run after."""
        self._texts = texts
        self._ids = ids
        self._by_name: dict[str, list[int]] | None = None

    def resolved(self, number: int, made: Sequence[object]) -> bytes:
        """Return the text of a task in which `after` has only ids. `made` holds the results of the tasks
        before this one, which are Problems if they were refused. Raises Problem for a reference to no earlier
        task."""
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
                continue  # This is an id, or a value that validation refuses.
            earlier = self._index_of(wanted, number)
            if isinstance(earlier, str) or isinstance(made[earlier], Problem):
                detail = earlier if isinstance(earlier, str) else f"task {earlier} of this batch was refused"
                faults.append(Fault(pointer=f"/after/{index}/task", detail=detail, code="unknown-task"))
                continue
            self.named.add(self._ids[earlier])
            after[index] = (
                {**item, "task": self._ids[earlier]} if isinstance(item, dict) else self._ids[earlier]
            )
            has_changed = True
        if faults:
            raise invalid(*faults)
        return to_json(body) if has_changed else text

    def _index_of(self, wanted: int | str, number: int) -> int | str:
        """Return the index of the task that a reference names, or a text that says what is wrong with it.
        `number` is the index of the task that has the reference."""
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
    """Return the JSON object in the text; empty if the text is no object, which validation reports."""
    try:
        value = from_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
