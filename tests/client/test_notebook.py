"""The HTML that notebooks show."""

from collections.abc import Iterator
from typing import Any

import pytest
from gpubroker import Array, Explanation, Gpu, Page, Task
from gpubroker.tasks.array_api import progress_bar
from gpubroker.transport.decoding import a_page, decode
from gpubroker.wire.nodes import Node
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from tests.client.recorded_service import FULL_ID, a_task

SCRIPT = "<script>alert(1)</script>"


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def shown(shell: InteractiveShell, value: Any) -> str:
    """Return the HTML that a notebook gets for a value."""
    assert shell.display_formatter is not None
    formats, _ = shell.display_formatter.format(value)  # type: ignore[no-untyped-call]  # IPython's
    return str(formats["text/html"])


def test_task_shows_its_fields_as_text(shell: InteractiveShell) -> None:
    why = {"reason": "WaitingForMemory", "message": "needs 18.0 GiB", "position": 4}
    html = shown(shell, decode(Task, a_task(FULL_ID, name=SCRIPT, pending=why)))
    assert "WaitingForMemory: needs 18.0 GiB" in html
    assert "&lt;script&gt;" in html
    assert "<script>" not in html


def test_lists_of_tasks_and_gpus_are_tables(shell: InteractiveShell) -> None:
    gpu = {"uuid": "GPU-1", "node": SCRIPT, "kind": "sim", "physical_mb": 24 * 1024, "leased_mb": 6 * 1024}
    html = shown(shell, a_page([decode(Gpu, gpu)] * 2))
    assert html.count("6.0 of 24.0") == 2
    assert "<script>" not in html
    tasks = a_page(decode(Task, a_task(f"task_{number}")) for number in range(101))
    assert "1 more are not shown" in shown(shell, tasks)


@pytest.mark.parametrize("items", [(), (decode(Node, {"name": "n1"}),)])
def test_other_lists_have_no_table(items: tuple[Any, ...]) -> None:
    page: Page[Any] = a_page(items)
    assert page._repr_html_() is None


def test_explanation_shows_reason_remedies_and_devices(shell: InteractiveShell) -> None:
    device = {"node": "n1", "index": 0, "kind": "sim", "free_mb": 1024, "message": "4 GiB are missing"}
    remedy = {"change": {"priority": 80}, "message": "with priority 80 <it> starts"}
    told = {"id": FULL_ID, "state": "pending", "reason": "WaitingForMemory", "message": "no room"}
    html = shown(shell, decode(Explanation, {**told, "remedies": [remedy], "devices": [device]}))
    for part in ("<b>WaitingForMemory</b>: no room", "priority 80 &lt;it&gt; starts", "4 GiB are missing"):
        assert part in html


def test_progress_in_a_notebook_is_a_bar(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "kernel", object(), raising=False)
    array = decode(Array, {"id": FULL_ID, "total": 4, "done": 1, "fraction": 0.25, "state": "running"})
    with capture_output() as captured:
        progress_bar()(array)
    assert [shown.data["text/html"] for shown in captured.outputs] == [
        "",
        '<progress max="1" value="0.2500"></progress> 1/4',
    ]
