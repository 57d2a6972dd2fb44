"""Operations on tasks: submit, follow, change, explain."""

import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, TypedDict, Unpack, cast
from weakref import ref

import cloudpickle

from gpubroker.errors import BrokerError, ResultUnreadable, WrongArgument
from gpubroker.runtime.objects import PICKLE_MARK, ObjectRef, opened_object
from gpubroker.runtime.output import STREAMS
from gpubroker.tasks.event_reading import EventOptions, EventReading
from gpubroker.tasks.explanation import Explanation
from gpubroker.tasks.large_arguments import caller, caller_options, fitting_body, without_arguments
from gpubroker.tasks.log_reading import BothStreams, LogLine, LogOptions, LogReading
from gpubroker.tasks.naming import find_task, id_meant, ids_after
from gpubroker.tasks.object_api import ObjectApi
from gpubroker.tasks.submission import (
    MOST_BODY_BYTES,
    AnySubmission,
    Given,
    Submission,
    SubmitOptions,
    Target,
    batch_body,
    body_of,
    is_to_upload,
    parts_of,
    plain,
    simulation_body,
    with_ids_after,
)
from gpubroker.tasks.task import AnyTask, Task, check_success, id_of
from gpubroker.tasks.uploading import directory_stored, with_stored
from gpubroker.tasks.waiting import Deadline
from gpubroker.transport.decoding import Page, a_page, decode, page_of
from gpubroker.transport.exchange import Call, Pause, Steps, error_of_problem
from gpubroker.transport.operations import (
    Pages,
    Reading,
    json_body,
    listing,
    operation,
    path_part,
    without_none,
)
from gpubroker.wire.events import Event
from gpubroker.wire.explanations import Simulation
from gpubroker.wire.forecasts import Estimate
from gpubroker.wire.tasks import Cancelled, Outcome, Stack

_BATCH_SECONDS = 60.0
_EVENTS_PER_PAGE = 500
_FOLLOW_PAUSE_SECONDS = 0.5


class Filters(TypedDict, total=False):
    """Selects tasks; a task must match all filters that are given."""

    state: Sequence[str] | str
    kind: str
    """The kind: entrypoint, command, function, inference, model, or external (a lease of a program that the
    broker does not start)."""
    min_priority: int
    max_priority: int
    labels: Mapping[str, str]
    name: str
    tenant: str
    """The tenant: another one, or `*` for all, needs the scope admin."""
    model_type: str
    stream: str
    after: AnyTask
    """The task that must end before the selected tasks."""
    submitted_from: datetime
    submitted_before: datetime
    finished_from: datetime
    finished_before: datetime


class ListOptions(Filters, total=False):
    """The filters of `list`."""

    order: str
    """The order: `newest` (default) first, or `turn`: running tasks, then waiting ones in the order of the
    queue, then those that ended last, in one page."""
    sort: str
    """The sort key: submitted, finished (only ended tasks) or priority. A `-` before it puts the latest or
    highest first. Default: -submitted."""
    limit: int
    """The number of tasks per page; all pages are fetched as they are used."""


class ChangeOptions(TypedDict, total=False):
    """The changes that `change` makes. None removes a time; options that are left out do not change."""

    priority: int | str
    """The priority from 0 to 100, or the name of a band."""
    held: bool
    """A held task stays in the queue until it is released (False)."""
    not_before: datetime | str | None
    queue_ttl_seconds: float | None
    """The longest wait for the first start, counted from the change, or from `not_before` if that is set."""
    deadline_at: datetime | str | None


TaskOrError = str | BrokerError
"""The id of a submitted task, or the error with which it was refused."""


class TaskApi(ObjectApi):
    @operation
    def submit(self, target: Target, *args: Any, **options: Unpack[SubmitOptions]) -> Steps[Task]:
        """Queue a task; when this returns, the task is on the service's disk.

            broker.submit("team.training:fit", "s3://data", kwargs={"epochs": 3}, gpu_mb=18 * 1024)
            broker.submit(["python", "train.py", "--epochs", "3"], gpus=1, priority="batch")
            broker.submit(function, 1, 2)

        `target` is the name of an entrypoint (arguments and result are JSON), a command as a list of words,
        or a function, which is pickled and needs the scope `tasks:code`; the modules that it imports must be
        importable where it runs. Arguments that are too large for a request are sent as objects; the function
        gets the values. Raises Refused, also for a task that can never fit.

        The options are those of `SubmitOptions`: kwargs (the task's own), name, priority, labels,
        model_type, profile, max_concurrency, stream; gpu_mb (MiB per GPU, or "learned"), gpus,
        gpu_fraction, exclusive, placement, cpu, memory_mb, custom; kinds, prefer_kinds, min_power,
        min_device_mb, nodes, prefer_nodes, pool, roles; bundles, strategy, min_ranks; max_retries,
        retry_on, timeout_seconds, grace_seconds; after, held, not_before, queue_ttl_seconds, deadline_at or
        deadline_seconds, expected_seconds; env, working_directory (of commands), upload (a directory that
        travels with the task), environment (interpreter and packages), modules (of functions), outputs,
        ray (True: a Ray cluster of its own), ray_dashboard, result_format, idempotency_key.
        """
        options = yield from with_ids_after(self._ask, target, options)
        body = yield from fitting_body(self._send, target, args, options)
        return self._task((yield from self._make("/tasks", options.get("idempotency_key"), body)))

    @operation
    def submit_many(
        self,
        tasks: Iterable[AnySubmission],
        *,
        all_or_nothing: bool = False,
        idempotency_key: str | None = None,
    ) -> Steps[Sequence[TaskOrError]]:
        """Queue many tasks; returns their ids in order, and an error in place of each refused task.

            broker.submit_many(Submission("team.images:resize", name, cpu=0.5) for name in names)

        Each task is a `Submission`, which takes the arguments of `submit`, or a mapping, the body of
        `POST /tasks`. They are sent in parts of up to 1,000, each stored in one commit. With
        `all_or_nothing`, up to 10,000 are stored together or not at all: then Refused is raised, and its
        `errors` name all wrong tasks. With your own key the call can be repeated with the same tasks. Raises
        only if nothing was accepted; a later error takes the place of each task that it affected.
        """
        bodies = yield from self._bodies_of(list(tasks))
        parts = parts_of(bodies, together=all_or_nothing)
        key = idempotency_key or uuid.uuid4().hex
        answers: list[TaskOrError] = []
        for number, part in enumerate(parts):
            own_key, body = key if len(parts) == 1 else f"{key}-{number}", batch_body(part, all_or_nothing)
            try:
                made = yield from self._make("/tasks/batch", own_key, body, patience_seconds=_BATCH_SECONDS)
            except BrokerError as error:
                if not answers:
                    raise
                return answers + [error] * (len(bodies) - len(answers))
            answers += [_id_or_error(item) for item in made["items"]]
        return answers

    def _with_directory(self, submission: Given, known: dict[str, ObjectRef]) -> Steps[Given]:
        """Return the submission with its directory replaced by an object. `known` maps directories that are
        already stored to their objects."""
        target, args, options = submission
        if not is_to_upload(options, target):
            return submission
        return target, args, (yield from with_stored(self._send, target, options, known))

    @operation
    def put_directory(self, directory: str | os.PathLike[str] = ".") -> Steps[ObjectRef]:
        """Store a directory once, as the `upload` of any number of tasks.

            code = broker.put_directory("project")
            tasks = [broker.submit(["python", "train.py", str(seed)], upload=code) for seed in range(8)]

        Files that `.gitignore` and `.gpubrokerignore` name are left out, and `.git` and `__pycache__`.
        Nothing is sent if the service already has the same directory. Raises WrongArgument for what cannot be
        sent.
        """
        return (yield from directory_stored(self._send, directory))

    @operation
    def simulate(
        self, target: Target | None = None, *args: Any, **options: Unpack[SubmitOptions]
    ) -> Steps[Simulation]:
        """Return what would become of this task if it were submitted now; nothing is stored.

        Without a target, the answer is about the demand alone. A refusal of the task is part of the answer;
        Refused is raised only if the token may not ask.
        """
        planned = {name: value for name, value in options.items() if name != "idempotency_key"}
        if is_to_upload(options, target):  # nothing is stored, and the directory does not matter
            target = None if isinstance(target, str) else target  # its code is in the directory
            kept = {name: value for name, value in planned.items() if name != "outputs"}
            planned = {**kept, "upload": None, "environment": None}
        options = yield from with_ids_after(self._ask, target, cast("SubmitOptions", planned))
        body = simulation_body(target, args, options)
        if len(body) > MOST_BODY_BYTES:  # the arguments do not matter
            body = simulation_body(target, (), without_arguments(options))
        if len(body) > MOST_BODY_BYTES and callable(target):  # nor does what the function refers to
            body = simulation_body(caller(), (), caller_options(target, options, {}))
        answer = yield from self._send(Call("POST", "/tasks/simulate", body=body))
        return decode(Simulation, answer.json())

    @operation
    def get(self, task: AnyTask, *, worker: str | None = None) -> Steps[Task]:
        """Return the task as it is now. The state of an array or a worker set is that of all its workers
        together; with the id of a `worker`, it is that of this worker."""
        return (yield from self._get(task, worker))

    @operation
    def wait(self, task: AnyTask, timeout_seconds: float | None = None) -> Steps[Task]:
        """Return the task once it has ended, however it ended. Raises WaitTimeout after `timeout_seconds`;
        the task continues."""
        return (yield from self._wait(task, timeout_seconds))

    @listing
    def as_completed(self, tasks: Iterable[AnyTask], *, timeout_seconds: float | None = None) -> Pages[Task]:
        """Yield each of the tasks once it has ended, however it ended, in the order in which they end.

            for task in broker.as_completed([fit.submit(rate) for rate in rates]):
                print(task.name, task.result())

        Those that had ended before come first. The iteration costs one request per task and one for each
        half second in which nothing ends. Raises WaitTimeout for one of the tasks that are left after
        `timeout_seconds`; all of them continue.
        """
        deadline, still_open, position = Deadline(timeout_seconds), dict[str, Task](), 0

        def fetch(cursor: str | None) -> Steps[Page[Task]]:
            nonlocal position
            ended: list[Task] = []
            if cursor is None:
                # The position is read before the tasks, so that no end between the two is missed.
                position = (yield from self._ask("GET", "/events", last=1))["next_after"]
                for task in tasks:
                    seen = yield from self._get(task)
                    if seen.is_finished:
                        ended.append(seen)
                    else:
                        still_open[seen.id] = seen
            else:
                page = yield from self._ask("GET", "/events", after=position, limit=_EVENTS_PER_PAGE)
                position = page["next_after"]
                for id in {event["key"]: None for event in page["items"] if event["key"] in still_open}:
                    seen = yield from self._get(id)
                    if seen.is_finished:
                        del still_open[id]
                        ended.append(seen)
                if not ended and still_open and deadline.is_over():
                    raise deadline.error(next(iter(still_open.values())))
                if not page["items"]:
                    yield Pause(_FOLLOW_PAUSE_SECONDS)
            return a_page(ended, "more" if still_open else None)

        return Pages(fetch)

    @operation
    def result(self, task: AnyTask, timeout_seconds: float | None = None) -> Steps[Any]:
        """Wait for the task and return its result. Raises TaskFailed, TaskCancelled or WaitTimeout, and
        ResultUnreadable for a pickle that cannot be opened here.

        A result in cloudpickle format, the default for functions, is unpickled here, which runs code that the
        task chose: use `outcome` for tasks you do not trust. A result that was too large has become an object
        (`outcome` has its id) and is fetched.
        """
        ended = yield from self._wait(task, timeout_seconds)
        outcome = yield from self._outcome(ended)
        if outcome.format == "object":
            check_success(outcome)
            data = yield from self._content(outcome.value["object"])
            return _opened(outcome.id, lambda: opened_result(data))
        return value_of(outcome)

    @operation
    def outcome(self, task: AnyTask) -> Steps[Outcome]:
        """Return how a finished task ended, with its pickled result as bytes and the end of its log."""
        return (yield from self._outcome(task))

    @operation
    def cancel(
        self, task: AnyTask, *, grace_seconds: float | None = None, reason: str | None = None
    ) -> Steps[Task]:
        """End the task; a running one gets notice and then its grace period."""
        body = without_none({"grace_seconds": grace_seconds, "reason": reason})
        path = yield from self._path(task, to_change=True)
        return self._task((yield from self._ask("POST", f"{path}/cancel", body)))

    @operation
    def retry(self, task: AnyTask, *, idempotency_key: str | None = None) -> Steps[Task]:
        """Run an ended task again, as a new task: the same run, resources, priority, labels and limits,
        without its dependencies, hold, start time and deadline. Raises Refused as `submit` does."""
        path = yield from self._path(task, to_change=True)
        return self._task((yield from self._make(f"{path}/retry", idempotency_key)))

    @operation
    def stack(self, task: AnyTask, *, rank: int = 0, worker: str | None = None) -> Steps[Stack]:
        """Return the stacks of the Python threads of a running task, which keeps running. `rank` selects a
        rank of a gang, and `worker` the id of a worker of an array or a set; by default the worker that runs.
        Raises Refused (`task-not-running`)."""
        path = yield from self._path(task)
        return decode(Stack, (yield from self._ask("GET", f"{path}/stack", rank=rank or None, worker=worker)))

    @operation
    def cancel_selected(
        self,
        *,
        everything: bool = False,
        grace_seconds: float | None = None,
        reason: str | None = None,
        dry_run: bool = False,
        **wanted: Unpack[Filters],
    ) -> Steps[Cancelled]:
        """Cancel all tasks that match, waiting ones before running ones. To cancel without a filter, pass
        `everything=True`. With `dry_run` the tasks are only counted."""
        given = _filters(wanted)
        if everything == bool(given):
            raise WrongArgument("give one filter or more, such as labels={...}, or everything=True")
        given |= without_none({"grace_seconds": grace_seconds, "reason": reason})
        given |= {name: True for name, is_set in (("all", everything), ("dry_run", dry_run)) if is_set}
        found: Cancelled | None = None
        while True:
            call = Call("POST", "/tasks/cancel", body=json_body(given), patience_seconds=_BATCH_SECONDS)
            part = decode(Cancelled, (yield from self._send(call)).json())
            found = part if found is None else found.plus(part)
            if dry_run or part.stored or not part.has_more:
                return found

    @operation
    def change(self, task: AnyTask, **wanted: Unpack[ChangeOptions]) -> Steps[Task]:
        """Change a task's priority, hold it in the queue (`held=True`) or release it, or change its times
        while it waits. The options are those of `ChangeOptions`."""
        body = {name: plain(name, value) for name, value in wanted.items()}
        path = yield from self._path(task, to_change=True)
        return self._task((yield from self._ask("PATCH", path, body)))

    @listing
    def list(self, **wanted: Unpack[ListOptions]) -> Pages[Task]:
        """Yield all tasks that match, fetched page by page as they are used; newest first unless sorted
        otherwise."""
        params = _filters(wanted)
        params |= {f"label.{key}": value for key, value in (params.pop("labels", None) or {}).items()}
        return self._pages(Task, "/tasks", context={"told_by": ref(self)}, **params)

    @operation
    def explain(self, task: AnyTask) -> Steps[Explanation]:
        """Return why the task waits, with a verdict per device, or where it runs."""
        path = yield from self._path(task)
        return decode(Explanation, (yield from self._ask("GET", f"{path}/explain")))

    @listing
    def events(
        self, task: AnyTask | None = None, *, follow: bool = False, **wanted: Unpack[EventOptions]
    ) -> Pages[Event] | Reading[Event]:
        """Yield the events of the log, oldest first; those of one task if given, or of all workers of an
        array or a worker set.

            for event in broker.events(follow=True, last=0, kind="task.failed"):
                print(event.key)

        With `follow` new events come as they are committed, through lost connections and restarts of the
        service, and without a gap or a repetition; the iteration ends when the task has ended, and never
        without one. The options are those of `EventOptions`: after (a position) or last (the number of newest
        events with which to begin, up to 500), kind (such as `task.failed`, or `task.*`), and without a task:
        tasks, labels, tenant. Raises Refused with the code events-gone if events that were yet to come are no
        longer kept.
        """

        def find() -> Steps[tuple[str, Mapping[str, Any]]]:
            params: dict[str, Any] = dict(wanted)
            params |= {f"label.{key}": value for key, value in params.pop("labels", {}).items()}
            named = []
            for one in params.pop("tasks", ()):
                named.append((yield from id_meant(self._ask, one)))
            if named:
                params["task"] = named
            if task is None:
                return "/events", without_none(params)
            id = yield from id_meant(self._ask, task)
            return f"/tasks/{path_part(id)}/events", without_none(params)

        return EventReading(find, self._retry_seconds) if follow else self._event_pages(find)

    def _event_pages(self, find: Callable[[], Steps[tuple[str, Mapping[str, Any]]]]) -> Pages[Event]:
        """Return the pages of the events that are kept by now."""
        found: tuple[str, Mapping[str, Any]] | None = None

        def fetch(cursor: str | None) -> Steps[Page[Event]]:
            nonlocal found
            found = found or (yield from find())
            path, params = found
            if cursor:
                params = {
                    **{name: given for name, given in params.items() if name != "last"},
                    "after": cursor,
                }
            raw = yield from self._ask("GET", path, **params, limit=_EVENTS_PER_PAGE)
            items = tuple(decode(Event, item) for item in raw["items"])
            reached = str(raw["next_after"])
            return a_page(items, None if reached == str(params.get("after", 0)) else reached, raw)

        return Pages(fetch)

    @listing
    def logs(self, task: AnyTask, **wanted: Unpack[LogOptions]) -> Reading[LogLine]:
        """Read the lines that a task has printed, with their line ends, while it runs and afterwards.

            for line in broker.logs(task, follow=True):
                print(line, end="", file=sys.stderr if line.stream == "stderr" else sys.stdout)

        A line is a `str` whose attribute `stream` names its stream. The options are those of `LogOptions`:
        attempt, stream (stdout or stderr; left out, both), rank, worker (of an array or a set with several),
        offset (in bytes of the stream) and follow, which goes on until the task has ended. The middle of a
        long log is not kept; a line in its place says so.
        """
        worker, follows = wanted.get("worker"), wanted.get("follow", False)

        path = ""

        def find() -> Steps[str]:
            nonlocal path
            path = path or (yield from self._path(task))
            return path

        def get() -> Steps[Task]:
            return self._task((yield from self._ask("GET", (yield from find()), worker=worker)))

        def of(options: LogOptions, *, polls: bool = False) -> LogReading:
            return LogReading(find, get, options, self._retry_seconds, polls=polls)

        if "stream" in wanted:
            return of(wanted)
        if "offset" in wanted:
            raise WrongArgument('offset counts the bytes of one stream; name it: stream="stdout"')
        return BothStreams(
            [of({**wanted, "stream": stream}, polls=follows) for stream in STREAMS], follows=follows
        )

    @operation
    def estimates(self, subject: str | None = None) -> Steps[Page[Estimate]]:
        """Return how much your past runs used, by model type (else name, else entrypoint) and kind of
        device."""
        return page_of(Estimate, (yield from self._ask("GET", "/estimates", subject=subject)))

    @operation
    def task_id(self, word: AnyTask, *, to_change: bool = False) -> Steps[str]:
        """Return the id of the task that a name or a part of an id means. Raises Refused if there is none, or
        more than one.

        A name means the one unfinished task that has it, and an ended one if there is none. With `to_change`,
        a word that is the name of one task and a part of another one's id is refused too.
        """
        return (yield from find_task(self._ask, id_of(word), to_change=to_change))

    def _bodies_of(self, tasks: Sequence[AnySubmission]) -> Steps[Sequence[bytes]]:
        """Return the bodies of a batch. A name in `after` of a Submission means the task of the batch that
        has it, if there is one; the service finds that one."""
        named = [task.name if isinstance(task, Submission) else _name_in(task) for task in tasks]
        known = {name: name for name in named if name}
        bodies: list[bytes] = []
        directories: dict[str, ObjectRef] = {}
        for task in tasks:
            if not isinstance(task, Submission):
                bodies.append(body_of(task))
                continue
            after = yield from ids_after(self._ask, task.after, known)
            if task.given is None:
                bodies.append(body_of(task, None if after == task.after else after))
                continue
            target, args, options = yield from self._with_directory(task.given, directories)
            options = cast("SubmitOptions", {**options, "after": after})
            bodies.append((yield from fitting_body(self._send, target, args, options)))
        return bodies

    def _path(self, task: AnyTask, *, to_change: bool = False) -> Steps[str]:
        return f"/tasks/{path_part((yield from id_meant(self._ask, task, to_change=to_change)))}"

    def _task(self, raw: Mapping[str, Any]) -> Task:
        return decode(Task, raw, told_by=ref(self))

    def _get(self, task: AnyTask, worker: str | None = None) -> Steps[Task]:
        path = yield from self._path(task)
        return self._task((yield from self._ask("GET", path, worker=worker)))

    def _wait(self, task: AnyTask, timeout_seconds: float | None) -> Steps[Task]:
        deadline = Deadline(timeout_seconds)
        path = yield from self._path(task)
        while True:
            left = deadline.next_poll_seconds()
            call = Call("GET", f"{path}/wait", {"timeout_seconds": left}, patience_seconds=left)
            seen = self._task((yield from self._send(call)).json())
            if seen.is_finished:
                return seen
            if deadline.is_over():
                raise deadline.error(seen)

    def _outcome(self, task: AnyTask) -> Steps[Outcome]:
        path = yield from self._path(task)
        return decode(Outcome, (yield from self._ask("GET", f"{path}/result")))


def opened_result(data: bytes) -> Any:
    """Return the value of a result that was stored as an object."""
    is_pickled = data[: len(PICKLE_MARK)] == PICKLE_MARK
    return opened_object(memoryview(data), unpickles=True) if is_pickled else json.loads(data)


def value_of(outcome: Outcome) -> Any:
    """Return the result of a finished task; a pickled result is unpickled. Raises as `check_success` does."""
    check_success(outcome)
    data = outcome.data
    return outcome.value if data is None else _opened(outcome.id, lambda: cloudpickle.loads(data))


def _opened(task: str, unpickle: Callable[[], Any]) -> Any:
    try:
        return unpickle()
    except Exception as fault:  # to unpickle may raise anything, also exceptions of other libraries
        raise ResultUnreadable(task, fault) from fault


def _filters(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the filters that are set, with states as a list."""
    given = {
        name: id_of(value) if name == "after" else plain(name, value)
        for name, value in wanted.items()
        if value not in (None, (), [], {})
    }
    if isinstance(given.get("state"), str):
        given["state"] = given["state"].split(",")
    return given


def _name_in(body: object) -> str | None:
    """Return the name in the body of a task. The service refuses a body of another form."""
    name = body.get("name") if isinstance(body, Mapping) else None
    return name if isinstance(name, str) else None


def _id_or_error(item: Mapping[str, Any]) -> TaskOrError:
    return str(item["id"]) if "id" in item else error_of_problem(item["problem"], int(item["status"]))
