"""Suggestions for misspelled names."""

from ampcompare.base.errors import close_matches, did_you_mean


def test_the_closest_names_are_suggested() -> None:
    assert did_you_mean("convnte", ["mlp", "convnet"]) == "did you mean 'convnet'?"
    assert did_you_mean("resnet19", ["resnet18", "resnet101"], count=2) == "did you mean 'resnet18' or 'resnet101'?"
    assert close_matches("zzz", ["mlp", "convnet"]) == []


def test_without_a_match_a_few_names_are_listed() -> None:
    assert did_you_mean("zzz", ["a", "b"]) == "known are a, b"
    assert did_you_mean("zzz", [f"name{i}" for i in range(20)]).endswith("name11 and 8 more")
    assert did_you_mean("zzz", []) == "known are none"
