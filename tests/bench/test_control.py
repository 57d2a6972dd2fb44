"""`python -m bench control` judges the controller, looks at a fleet, and fills a day."""

from argparse import ArgumentParser

from bench import control


def test_it_measures_each_load_a_look_and_a_day() -> None:
    parser = ArgumentParser()
    control.add_options(parser)
    figures = {
        one.figure: one.value
        for one in control.measure(
            parser.parse_args(
                ["--nodes", "3", "--looks", "3", "--cycles", "10", "--seeds", "1", "--hours", "1"]
            )
        )
    }
    assert figures["control.falling.overshoot"] == 0.0
    assert 0.0 < figures["control.falling.settle_s"] < 300.0
    assert figures["control.look_ms"] > 0.0
    assert figures["control.day.filled.held"] > figures["control.day.plain.held"]
    assert figures["control.cycle.p99_ms"] > 0.0
    assert figures["control.published_kb"] > 0.0
    assert figures["control.scrape_text_ms"] > 0.0
    assert len(figures) == 25
