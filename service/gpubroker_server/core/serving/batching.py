"""What a model is asked and what it answers, as they are stored, joined into batches and cut again.

Values are turned into bytes once, where a request comes in: whoever joins and cuts does not look into them.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gpubroker_server.core.serving.tensors import BadTensor, Tensor, rows_cut

FORMAT: Final = "tensors"
"""The form of a result that is an `Answer`."""

_LENGTH_BYTES: Final = 4
_OWN_STATE: Final = frozenset({"sequence_id", "sequence_start", "sequence_end"})
"""Parameters of requests that are one after another's affair."""


@dataclass(frozen=True, slots=True)
class Question:
    inputs: tuple[Tensor, ...]
    version: str = ""
    """Of the model; empty: the one that its server takes for itself."""
    outputs: tuple[str, ...] = ()
    """All if there are none."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    @property
    def rows(self) -> int:
        """Of each of its inputs; 0 if they do not have the same number."""
        found = {tensor.rows for tensor in self.inputs}
        return found.pop() if len(found) == 1 else 0

    @property
    def may_be_joined(self) -> bool:
        """With others, along the first dimension."""
        return self.rows > 0 and not _OWN_STATE & self.parameters.keys()

    def likes(self) -> tuple[Any, ...]:
        """Equal for those that may share a batch: they differ in their rows alone."""
        inputs = tuple((one.name, one.datatype, one.shape[1:]) for one in self.inputs)
        return self.version, inputs, self.outputs, json.dumps(self.parameters, sort_keys=True)


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    version: str
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""


def batches(questions: Sequence[Question], most_rows: int) -> list[list[int]]:
    """Which of them are asked together, by place, in the order of the first of each batch. None has more than
    `most_rows` rows, unless one of its own accord."""
    open_ones: dict[tuple[Any, ...], tuple[int, list[int]]] = {}
    found: list[list[int]] = []
    for place, question in enumerate(questions):
        if most_rows < 2 or not question.may_be_joined:
            found.append([place])
            continue
        likes = question.likes()
        rows, batch = open_ones.get(likes, (most_rows, []))
        if rows + question.rows > most_rows:
            rows, batch = 0, []
            found.append(batch)
        batch.append(place)
        open_ones[likes] = rows + question.rows, batch
    return found


def joined(questions: Sequence[Question]) -> Question:
    """Of a batch: all their rows, one after the other."""
    first, *others = questions
    if not others:
        return first
    rows = sum(question.rows for question in questions)
    inputs = (
        replace(one, shape=(rows, *one.shape[1:]), data=b"".join(q.inputs[at].data for q in questions))
        for at, one in enumerate(first.inputs)
    )
    return replace(first, inputs=tuple(inputs), id="")


def cut(answer: Answer, questions: Sequence[Question]) -> list[Answer]:
    """Each one's part of what a batch was answered. Raises BadTensor if the model did not answer by rows."""
    rows = [question.rows for question in questions]
    outputs = [rows_cut(tensor, rows) for tensor in answer.outputs]
    return [
        replace(answer, outputs=tuple(parts[at] for parts in outputs), id=question.id)
        for at, question in enumerate(questions)
    ]


def packed(said: Question | Answer) -> bytes:
    """As it is stored: how long its head is, the head as JSON, and the tensors' data."""
    tensors = said.inputs if isinstance(said, Question) else said.outputs
    head: dict[str, Any] = {
        "id": said.id,
        "version": said.version,
        "parameters": dict(said.parameters),
        "tensors": [[one.name, one.datatype, list(one.shape), len(one.data)] for one in tensors],
    }
    if isinstance(said, Question):
        head["outputs"] = list(said.outputs)
    else:
        head["model"] = said.model
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((len(text).to_bytes(_LENGTH_BYTES, "little"), text, *(one.data for one in tensors)))


def question_in(data: bytes) -> Question:
    """Raises BadTensor."""
    head, tensors = _unpacked(data)
    return Question(tensors, head["version"], tuple(head["outputs"]), head["parameters"], head["id"])


def answer_in(data: bytes) -> Answer:
    """Raises BadTensor."""
    head, tensors = _unpacked(data)
    return Answer(head["model"], head["version"], tensors, head["parameters"], head["id"])


def _unpacked(data: bytes) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        head = json.loads(data[_LENGTH_BYTES:begin])
        rows = [(name, datatype, tuple(shape), size) for name, datatype, shape, size in head["tensors"]]
    except (ValueError, KeyError, TypeError) as fault:
        raise BadTensor(f"what was stored cannot be read: {fault}") from None
    return head, _sliced(rows, data, begin)


def wire_of(question: Question) -> tuple[bytes, list[bytes]]:
    """The head of a request in Triton's binary form, and what follows it."""
    head: dict[str, Any] = {
        "inputs": [
            {
                "name": one.name,
                "datatype": one.datatype,
                "shape": one.shape,
                "parameters": {"binary_data_size": len(one.data)},
            }
            for one in question.inputs
        ],
        "parameters": {**question.parameters, "binary_data_output": True},
    }
    if question.id:
        head["id"] = question.id
    if question.outputs:
        binary = {"binary_data": True}
        head["outputs"] = [{"name": name, "parameters": binary} for name in question.outputs]
    return json.dumps(head, separators=(",", ":")).encode(), [one.data for one in question.inputs]


def answer_on_wire(body: bytes, head_bytes: int) -> Answer:
    """Of what Triton answered; its head has that length. Raises BadTensor."""
    try:
        head = json.loads(body[:head_bytes])
        outputs = [
            (
                str(one["name"]),
                str(one["datatype"]),
                tuple(map(int, one["shape"])),
                int(one["parameters"]["binary_data_size"]),
            )
            for one in head["outputs"]
        ]
        model, version = str(head["model_name"]), str(head["model_version"])
        parameters, id = dict(head.get("parameters") or {}), str(head.get("id") or "")
    except (ValueError, KeyError, TypeError, OverflowError) as fault:
        raise BadTensor(f"the answer cannot be read: {fault!r}") from None
    return Answer(model, version, _sliced(outputs, body, head_bytes), parameters, id)


def _sliced(
    rows: Iterable[tuple[str, str, tuple[int, ...], int]], data: bytes, begin: int
) -> tuple[Tensor, ...]:
    """Raises BadTensor if they do not fill it."""
    tensors, at = [], begin
    for name, datatype, shape, size in rows:
        tensors.append(Tensor(name, datatype, shape, data[at : at + size]))
        at += size
    if at != len(data):
        raise BadTensor(f"its tensors take {at - begin} bytes, and {len(data) - begin} came")
    return tuple(tensors)
