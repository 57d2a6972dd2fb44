"""What stands between a request and its answer: what it does not look into, it passes on."""

from collections.abc import Sequence

from gpubroker_server.ports.backends import Answer, Asking, Header, Trouble


class Between(Asking, Answer):
    _asking: Asking
    """What the client's side calls."""
    _answer: Answer
    """What the server's side calls."""

    def write(self, data: bytes) -> None:
        self._asking.write(data)

    def flush(self) -> None:
        self._asking.flush()

    def end(self) -> None:
        self._asking.end()

    def cancel(self) -> None:
        self._asking.cancel()

    def hold_answer(self) -> None:
        self._asking.hold_answer()

    def go_on_with_answer(self) -> None:
        self._asking.go_on_with_answer()

    def on_head(self, status: int, headers: Sequence[Header], body_bytes: int | None) -> None:
        self._answer.on_head(status, headers, body_bytes)

    def on_body(self, data: bytes) -> None:
        self._answer.on_body(data)

    def on_pause(self) -> None:
        self._answer.on_pause()

    def on_end(self) -> None:
        self._answer.on_end()

    def on_trouble(self, trouble: Trouble, detail: str) -> None:
        self._answer.on_trouble(trouble, detail)

    def hold_body(self) -> None:
        self._answer.hold_body()

    def go_on_with_body(self) -> None:
        self._answer.go_on_with_body()
