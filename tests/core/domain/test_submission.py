"""What many tasks are together."""

from gpubroker_server.core.domain.submission import BatchSubmission, RunSpec, Submission, secrets_named

from tests.builders import a_task


def test_a_batch_is_named_by_its_first_task() -> None:
    tasks = [a_task("t1", tenant="lab"), a_task("t2", tenant="lab")]
    batch = BatchSubmission([Submission(task, RunSpec("entrypoint")) for task in tasks])
    assert (batch.first, batch.tenant) == ("t1", "lab")


def test_secrets_are_named_by_the_values_of_variables() -> None:
    env = {"WANDB_KEY": "secret:wandb", "MODE": "secret", "EMPTY": ""}
    assert secrets_named(env) == {"WANDB_KEY": "wandb"}
