"""What several servers have done is summed as one server would count it, over both protocols alike."""

from typing import Any

from google.protobuf.json_format import MessageToDict
from gpubroker_server.inference.operation import FanOut
from gpubroker_server.inference.protocols.triton.fan_out import summed_statistics
from gpubroker_server.inference.protocols.triton_grpc.messages import merged_replies
from tritonclient.grpc import service_pb2 as messages

TIMES = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


def a_row(name: str, version: str, factor: int, **changes: Any) -> dict[str, Any]:
    """Of one server, each count another one."""
    return {
        "name": name,
        "version": version,
        "last_inference": 1000 * factor,
        "inference_count": 3 * factor,
        "execution_count": 2 * factor,
        "inference_stats": {
            time: {"count": factor + i, "ns": 10 * factor + i} for i, time in enumerate(TIMES)
        },
        "response_stats": {"0": {"success": {"count": factor, "ns": 7}}},
        "batch_stats": [{"batch_size": factor, "compute_infer": {"count": factor, "ns": 5}}],
        "memory_usage": [{"type": "GPU", "id": 0, "byte_size": factor}],
        **changes,
    }


ONE = [a_row("m", "1", 1), a_row("only", "1", 5)]
OTHER = [a_row("m", "1", 2), a_row("m", "2", 3)]


def of_m(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(row for row in rows if (row["name"], row["version"]) == ("m", "1"))


def test_counts_and_times_are_added() -> None:
    rows = summed_statistics([ONE, OTHER])
    assert [row for row in rows if row["name"] == "only" or row["version"] == "2"] == [ONE[1], OTHER[1]]
    row = of_m(rows)
    assert (row["last_inference"], row["inference_count"], row["execution_count"]) == (2000, 9, 6)
    assert row["inference_stats"]["queue"] == {"count": 3 + 4, "ns": 12 + 22}
    assert row["response_stats"] == {"0": {"success": {"count": 3, "ns": 14}}}
    assert row["batch_stats"] == [ONE[0]["batch_stats"][0], OTHER[0]["batch_stats"][0]]
    assert row["memory_usage"] == ONE[0]["memory_usage"] + OTHER[0]["memory_usage"]


def test_batches_of_one_size_are_added() -> None:
    batch = {"batch_size": 4, "compute_infer": {"count": 2, "ns": 5}}
    [row] = summed_statistics([[a_row("m", "1", 1, batch_stats=[batch])]] * 2)
    assert row["batch_stats"] == [{"batch_size": 4, "compute_infer": {"count": 4, "ns": 10}}]


def test_a_model_without_a_field_is_added_all_the_same() -> None:
    short = {"name": "m", "version": "1", "inference_count": 1}
    [row] = summed_statistics([[short], [ONE[0]]])
    assert (row["inference_count"], row["execution_count"]) == (4, 2)


def test_over_grpc_the_sums_are_the_same() -> None:
    replies = [a_response(rows).SerializeToString() for rows in (ONE, OTHER)]
    found = messages.ModelStatisticsResponse.FromString(merged_replies(FanOut.STATISTICS, replies))
    assert MessageToDict(found) == MessageToDict(a_response(summed_statistics([ONE, OTHER])))


def a_response(rows: list[dict[str, Any]]) -> Any:
    response = messages.ModelStatisticsResponse()
    for row in rows:
        added = response.model_stats.add(
            name=row["name"],
            version=row["version"],
            last_inference=row["last_inference"],
            inference_count=row["inference_count"],
            execution_count=row["execution_count"],
            memory_usage=row["memory_usage"],
        )
        for time, value in row["inference_stats"].items():
            getattr(added.inference_stats, time).MergeFrom(messages.StatisticDuration(**value))
        for batch in row["batch_stats"]:
            added.batch_stats.add(
                batch_size=batch["batch_size"],
                compute_infer=messages.StatisticDuration(**batch["compute_infer"]),
            )
        for key, value in row["response_stats"].items():
            added.response_stats[key].success.MergeFrom(messages.StatisticDuration(**value["success"]))
    return response
