"""Does the page of audits show what was found, and say what it does not mean?"""

import re

import pytest

from vestige.compare.report import audits_page

AUDIT = {
    "task": "stand-in", "method": "dp-sgd", "canary": "gradient", "sees": "releases", "runs": 400, "confidence": 0.95,
    "delta": 1e-5, "epsilon": 3.0, "epsilon_lower_bound": 1.25, "contradicts": False, "area": {"estimate": 0.9},
    "roc": [[0, 0], [0.1, 0.6], [1, 1]], "roc_allowed": [[0, 0.1], [0.1, 0.7], [1, 1]],
}  # fmt: skip
ONE = {"run": "my-run", "method": "fo-dp-sgd", "epsilon": None, "delta": 1e-5, "canaries": 1000, "confidence": 0.95,
       "epsilon_lower_bound": 0.8, "contradicts": False}  # fmt: skip


def test_audits_of_a_kind_share_a_figure_and_equal_names_are_numbered():
    found = [AUDIT, {**AUDIT, "epsilon": 1.0}, AUDIT, ONE]
    labels = audits_page.labelled(found)
    assert labels == ["dp-sgd, epsilon 3", "dp-sgd, epsilon 1", "dp-sgd, epsilon 3 #2", "fo-dp-sgd, no epsilon"]
    kinds = audits_page._bounds(found, labels)
    assert [len(figure.series) for figure in kinds] == [3, 1]
    assert kinds[0].series[0].points == ((0.0, 1.25, 1.25, 3.0),)
    assert kinds[1].series[0].points == ((0.0, 0.8, None, None),)
    curves = audits_page._curves(found, labels)
    assert len(curves) == 3
    assert [each.name for each in curves[0].series] == ["the attack", "the most that the accountant allows", "guessing"]
    assert curves[0].series[0].points[1] == (0.1, 0.6, None, None)


def test_the_page_is_one_file_and_keeps_its_words_to_what_was_found():
    page = audits_page.page([AUDIT, ONE], "A <test>")
    assert "A &lt;test&gt;" in page
    assert set(re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", page)) <= {"data:,"}
    assert audits_page.STANDS in page
    assert "(accountant, not verified)" in page
    assert "they are not sealed" in page
    assert "no epsilon holds for it" in page
    assert "Not private" not in page
    broken = audits_page.page([{**AUDIT, "task": "digits-mlp", "contradicts": True}], "t")
    assert audits_page.STANDS not in broken
    assert "In 1 of 1 audits" in broken
    assert "Not private:</b> audits of digits-mlp" in broken
    assert "has no curve" in audits_page.page([ONE], "t")


def test_figures_are_files_too(tmp_path):
    pytest.importorskip("matplotlib")
    assert "wrote 2 figures" in audits_page.export([AUDIT], tmp_path)[0]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == [
        "bounds-gradient-canary-releases-seen.svg",
        "roc-1.svg",
    ]
