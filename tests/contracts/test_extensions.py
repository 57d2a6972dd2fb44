"""Extensions in threads of their own: faults, slowness, and the example that posts to a chat."""

import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpubroker_server.adapters import extensions
from gpubroker_server.adapters.extensions import ExtensionRefused, RunningExtension, installed
from gpubroker_server.core.domain.units import Instant, Position
from gpubroker_server.core.world.events import Event
from structlog.testing import capture_logs

from examples.chat_webhook import ChatWebhook
from tests.patience import PATIENCE_SECONDS


def an_event(kind: str, key: str) -> Event:
    return Event(Position(1), Instant(1.0), kind, key, 1, "default", {})


class Recording:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.options: Mapping[str, Any] = {}
        self.seen: list[str] = []
        self.threads: set[str] = set()
        self.go_on = threading.Event()
        self.go_on.set()
        self.has_begun = threading.Event()

    def start(self, options: Mapping[str, Any]) -> None:
        if "fault" in options:
            raise ValueError("no address")
        self.options = options

    def on_event(self, event: Mapping[str, Any]) -> None:
        self.threads.add(threading.current_thread().name)
        self.has_begun.set()
        assert self.go_on.wait(PATIENCE_SECONDS)
        if event["key"] == "wrong":
            raise RuntimeError("of the test")
        self.seen.append(event["key"])

    def stop(self) -> None:
        self.seen.append("stopped")


def test_events_come_in_order_in_a_thread_of_its_own() -> None:
    recording = Recording()
    running = RunningExtension("chat", recording)
    running.start({"url": "u"})
    running.offer([an_event("task.failed", key) for key in ("a", "b")])
    running.stop()
    assert (recording.options, recording.seen) == ({"url": "u"}, ["a", "b", "stopped"])
    assert recording.threads == {"extension chat"}


def test_a_fault_is_counted_and_logged_and_the_next_event_comes() -> None:
    recording = Recording()
    running = RunningExtension("chat", recording)
    running.start({})
    with capture_logs() as logs:
        running.offer([an_event("task.failed", key) for key in ("wrong", "wrong", "right")])
        running.stop()
    assert recording.seen == ["right", "stopped"]
    assert (running.delivered, running.failed, running.dropped) == (1, 2, 0)
    assert [line["event"] for line in logs] == ["an extension failed on an event"]


def test_a_slow_extension_loses_events_and_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "MAX_QUEUED", 2)
    recording = Recording()
    running = RunningExtension("chat", recording)
    running.start({})
    recording.go_on.clear()
    running.offer([an_event("task.failed", "first")])
    assert recording.has_begun.wait(PATIENCE_SECONDS)
    with capture_logs() as logs:
        running.offer([an_event("task.failed", key) for key in ("second", "third", "fourth", "fifth")])
    assert running.dropped == 2
    assert [line["fault"] for line in logs] == ["2 events were dropped since the start"]
    recording.go_on.set()
    running.stop()
    assert recording.seen == ["first", "second", "third", "stopped"]


def test_one_that_cannot_start_is_refused_with_its_options() -> None:
    with pytest.raises(ExtensionRefused, match=r"cannot start: ValueError.*extensions\.chat"):
        RunningExtension("chat", Recording()).start({"fault": True})


def test_only_installed_extensions_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = tmp_path / "chat-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Name: chat\nVersion: 1.0\n", encoding="utf-8")
    named = "[gpubroker.extensions]\nchat = examples.chat_webhook:ChatWebhook\nodd = examples.nothing:Here\n"
    (described / "entry_points.txt").write_text(named, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(installed("chat"), ChatWebhook)
    with pytest.raises(ExtensionRefused, match=r'"caht".*chat, odd.*install the package'):
        installed("caht")
    with pytest.raises(ExtensionRefused, match=r'"odd" \(examples.nothing:Here\) cannot be loaded'):
        installed("odd")


@pytest.fixture
def chat() -> Iterator[tuple[str, list[str]]]:
    """The address of a chat's webhook, and what was posted there."""
    posted: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["text"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Write nothing to the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", posted
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_example_posts_the_events_of_its_kinds(chat: tuple[str, list[str]]) -> None:
    url, posted = chat
    running = RunningExtension("chat", ChatWebhook())
    running.start({"url": url, "kinds": ["task.failed"]})
    running.offer([an_event("task.failed", "t1"), an_event("task.submitted", "t2")])
    running.stop()
    assert posted == ["task.failed: t1 of default"]
    assert (running.delivered, running.failed) == (2, 0)
