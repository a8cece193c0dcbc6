"""What can a comparison be of? A specification survives JSON, and one that makes no sense is refused by name."""

import json
from dataclasses import replace

import pytest

from commands import vestige
from comparisons import AUTO, TINY
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Contender, Specification
from vestige.run_records import FORMAT_VERSION, PrivacyTarget


def test_specification_survives_json():
    content = json.loads(json.dumps(replace(TINY, tune={"beta": (0.8,)}).to_json()))
    assert Specification.from_json(content) == replace(TINY, tune={"beta": (0.8,)})
    with pytest.raises(ValueError, match="another version"):
        Specification.from_json({**content, "colour": 1})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budgets": ()}, "budgets=.* is empty"),
        ({"seeds": ()}, "seeds=.* is empty"),
        ({"contenders": ()}, "contenders=.* is empty"),
        ({"factors": ()}, "grid of learning rates"),
        ({"factors": (-1.0,)}, "must all be positive"),
        ({"tune": {"beta": ()}}, "empty grid"),
        ({"validation": 1.0}, "validation=1.0"),
        ({"tuning_seeds": (2,)}, "fresh"),
        ({"seeds": (0, 1, 1003), "tuning_seeds": (1000, 1001)}, "fresh"),
        ({"tuning_seeds": ()}, "one run at least"),
        ({"choose": "twice"}, "choose='twice' is unknown"),
        ({"rates": ("given",)}, "lr=None"),
        ({"rates": ("best",)}, "unknown"),
        ({"contenders": (Contender("a", "dp-sgd"), Contender("a", "dp-sgd"))}, "twice"),
    ],
)
def test_bad_specifications_are_refused_with_a_line(change, words):
    with pytest.raises(ValueError, match=words):
        replace(TINY, **change)


def test_a_budget_must_be_positive_and_known():
    with pytest.raises(ValueError, match="epsilon=-1"):
        PrivacyTarget("epsilon", -1)
    with pytest.raises(ValueError, match="unknown"):
        PrivacyTarget("gold", 1)


def _specified(change):
    content = json.loads(json.dumps({"version": FORMAT_VERSION, "specification": AUTO.to_json()}))
    change(content["specification"])
    return content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"version": 2}, "the specification is None"),
        ({"version": 2, "specification": {}}, "lacks the field 'problems'"),
        (
            _specified(lambda spec: spec["problems"][0].update(colour="red")),
            r"problems\[0\] has an unknown field 'colour'",
        ),
        (_specified(lambda spec: spec["budgets"][0].update(value="3")), r"budgets\[0\]: value is '3', not a number"),
        (_specified(lambda spec: spec.update(seeds="012")), "seeds is '012', not a list"),
        (_specified(lambda spec: spec.update(steps=True)), "steps is True, not a whole number"),
        (_specified(lambda spec: spec.update(tune=[])), r"tune is \[\], not an object"),
        (_specified(lambda spec: spec.update(reproducible="no")), "reproducible is 'no', not true or false"),
        (_specified(lambda spec: spec.update(baseline=None)), "baseline is None, not text"),
    ],
)
def test_a_specification_that_is_none_is_refused_in_a_line(tmp_path, content, words):
    (tmp_path / "spec.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=words) as told:
        ComparisonFolder(tmp_path).specification()
    assert str(tmp_path / "spec.json") in str(told.value)


def test_every_command_says_in_a_line_that_a_specification_is_none(tmp_path):
    (tmp_path / "spec.json").write_text('{"version": 2}')
    for words in (["compare", "--resume"], ["report"], ["verify"]):
        code, _, errors = vestige(*words, str(tmp_path))
        assert (code, errors.count("\n")) == (2, 1), errors
        assert "spec.json cannot be read" in errors
