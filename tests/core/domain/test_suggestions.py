"""What a misspelled name may have meant."""

from gpubroker_server.core.domain.suggestions import did_you_mean, meant_field, nearest


def test_the_most_similar_name_is_meant_if_one_is_similar() -> None:
    assert nearest("visoin", {"speech", "vision"}) == "vision"
    assert nearest("prt", ["port"], cutoff=0.9) == ""
    assert did_you_mean("visoin", ["vision"], otherwise="no") == 'did you mean "vision"?'
    assert did_you_mean("x", [], otherwise="none are known") == "none are known"


def test_unknown_field_is_looked_for_here_then_inside_then_by_similarity() -> None:
    inner = {"resources": ["gpu_mb", "cpu"]}
    assert meant_field("name", ["name", "resources"], inner) == 'did you mean "name"?'
    assert meant_field("cpu", ["name", "resources"], inner) == 'did you mean "resources.cpu"?'
    assert meant_field("nmae", ["name", "resources"], inner) == 'did you mean "name"?'
    assert meant_field("x", ["name", "resources"], inner) == "known are name, resources"
    assert meant_field("x", [], {}) == "none is known here"
