"""Does `vestige reproduce br-table3` set each area beside the printed one, and go on where it was?"""

import json

import pytest

from commands import as_json, vestige
from vestige.audit import dpsgd_br_table3
from vestige.audit.inference import NON_PRIVATE
from vestige.compare.paper_presets import published


def cell(value):
    return {"estimate": value, "low": value - 0.025, "high": value + 0.025}


@pytest.fixture
def asked(monkeypatch):
    """Made-up results; what was asked for."""
    made = []

    class Found:
        def to_json(self):
            attack = {"area": cell(0.625), "detected_at_1_percent": cell(0.02)}
            names = ("shadow", "gradients", "lira", "lira-offline", "loss")
            right = {"nonprivate_accuracy_of_members": 1.0, "nonprivate_accuracy_of_others": 0.5}
            return {"attacks": dict.fromkeys(names, attack), "seconds": 1.0, **right}

    def infer(method, **given):
        made.append((getattr(method, "name", method), given["epsilon"], given["steps"], given["task"]))
        return Found()

    monkeypatch.setattr(dpsgd_br_table3, "infer_membership", infer)
    return made


def test_each_printed_area_stands_beside_its_own_method_and_epsilon(asked):
    study, printed = dpsgd_br_table3.Study(), published()["dpsgd_br"]
    lines = [study.infer(case, printed, "x", "cpu") for case in study.cases()]
    assert len(asked) == 3 * 4 + 1
    assert asked[0] == ("dp-sgd", 1, 200, "cifar10-cnn")
    assert asked[-1] == (NON_PRIVATE, None, 1600, "cifar10-cnn")
    rows = {
        (row["attack"], row["method"], row["epsilon"]): row["printed"] for row in dpsgd_br_table3.beside(lines, printed)
    }
    assert len(rows) == 5 * 13
    assert rows["black-box shadow", "dpsgd-br", 4] == 0.506
    assert rows["white-box partial", "dpsgd", 2] == 0.508
    assert rows["white-box partial", NON_PRIVATE, None] == 0.743
    assert rows["black-box shadow", "dpsgd", 1] is None
    assert rows["lira", "dpsur", 1] is None


def test_lines_that_are_there_are_not_made_again(asked, tmp_path):
    words = ["reproduce", "br-table3", "--small", "--out", str(tmp_path / "out")]
    code, said, error = vestige(*words)
    assert code == 0, error
    assert "│ 0.625 │ 0.600 to 0.650 │" in said
    assert [method for method, *_ in asked] == ["dp-sgd", "dpsur", "dpsgd-br", NON_PRIVATE]
    assert "ours on digits-mlp" in said
    found = as_json(*words)
    assert found["nonprivate"] is True
    assert len(asked) == 4
    assert found["beside"][0] == {
        "attack": "black-box shadow",
        "method": "dpsgd",
        "epsilon": 1,
        "printed": None,
        "area": cell(0.625),
        "detected_at_1_percent": 0.02,
        "nonprivate_accuracy_of_members": 1.0,
        "nonprivate_accuracy_of_others": 0.5,
    }
    for more, wrong in (
        (("--data", tmp_path), "holds a study of other settings"),
        (("--workers", "2"), "one after another, in this process"),
    ):
        code, _, error = vestige(*words, *more)
        assert code == 2
        assert wrong in error


@pytest.mark.slow
def test_digits_without_privacy_are_told_and_private_ones_not(tmp_path):
    vestige("reproduce", "br-table3", "--small", "--out", str(tmp_path / "out"))
    lines = json.loads((tmp_path / "out" / "membership.json").read_text())["lines"]
    areas = {line["name"]: line["attacks"]["lira"]["area"]["estimate"] for line in lines}
    assert areas.pop(NON_PRIVATE) > 0.6
    assert all(abs(area - 0.5) < 0.08 for area in areas.values())
