"""What a task keeps for its run while it waits, in bytes."""

from gpubroker_server.core.domain.submission import RunSpec, bytes_of


def test_arguments_command_env_and_labels_count_in_bytes_of_utf8() -> None:
    assert bytes_of(RunSpec("entrypoint", arguments=b"12345")) == 5
    assert bytes_of(RunSpec("command", command=("echo", "zwölf"))) == 4 + 6
    assert bytes_of(RunSpec("command", env={"A": "é"}, labels={"team": "vision"})) == 3 + 10
