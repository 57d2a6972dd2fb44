"""Metrics as text, read by Prometheus's own library."""

from math import inf

from gpubroker_server.telemetry.exposition import Buckets, counter, gauge, histogram, text_of
from prometheus_client.parser import text_string_to_metric_families

ODD = 'a "b"\n\\n, c=d}'


def test_what_is_written_is_what_is_read() -> None:
    text = text_of(
        [
            gauge("used", "What is used.", ("node", "gpu"), [(("n1", ODD), 2.5), (("n2", ""), 1e18)]),
            gauge("age_seconds", "Its age.", (), [((), inf)]),
            counter("ends", "Ends.", ("node",), [(("n1",), True)]),
            histogram("wait_seconds", "Waits.", ("way",), (0.5, 1.0), [Buckets(("a",), (3, 3, 4), 7.5)]),
            gauge("nothing", "None of it.", ("node",), []),
        ]
    )
    read = {family.name: family for family in text_string_to_metric_families(text.decode())}
    assert {name: (family.type, family.documentation) for name, family in read.items()} == {
        "used": ("gauge", "What is used."),
        "age_seconds": ("gauge", "Its age."),
        "ends": ("counter", "Ends."),
        "wait_seconds": ("histogram", "Waits."),
        "nothing": ("gauge", "None of it."),
    }
    assert [(it.name, it.labels, it.value) for family in read.values() for it in family.samples] == [
        ("used", {"node": "n1", "gpu": ODD}, 2.5),
        ("used", {"node": "n2", "gpu": ""}, 1e18),
        ("age_seconds", {}, inf),
        ("ends_total", {"node": "n1"}, 1.0),
        ("wait_seconds_bucket", {"way": "a", "le": "0.5"}, 3.0),
        ("wait_seconds_bucket", {"way": "a", "le": "1.0"}, 3.0),
        ("wait_seconds_bucket", {"way": "a", "le": "+Inf"}, 4.0),
        ("wait_seconds_count", {"way": "a"}, 4.0),
        ("wait_seconds_sum", {"way": "a"}, 7.5),
    ]
