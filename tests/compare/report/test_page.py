"""Is the page one file that asks nobody, and do its numbers come from the records?"""

import json
import re
import shutil
from itertools import product

import numpy as np
import pytest
from typer.testing import CliRunner

from comparisons import MANY, SMALL, one_cell
from vestige.cli import main
from vestige.cli import report as cli_report
from vestige.cli.report import write_report
from vestige.compare import aggregate_results, paper_presets
from vestige.compare.folder import ComparisonFolder
from vestige.compare.report import figures
from vestige.compare.report import page as report
from vestige.compare.report import privacy as report_privacy
from vestige.compare.report.privacy import privacy
from vestige.run_records import Run, read_record


def test_the_page_is_one_small_file_that_asks_nobody(content):
    page = report.page(content)
    assert len(page.encode()) < 5_000_000
    assert "A &lt;test&gt; &amp; more" in page
    outside = re.findall(r"""(?:src|href)=["']([^"'#][^"']*)""", page)
    assert set(outside) <= {"data:,"}
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|https?://(?!www\.w3\.org)", page)


def enlarged(content, tasks=3, budgets=4, seeds=10, factors=7):
    """Copies of real records for every method, with names, ids and all the digits of their own."""
    numbers = np.random.default_rng(0)
    done = [record for record in content["records"] if record["status"] == "done"]
    patterns = {stage: next(r for r in done if r["run"]["stage"] == stage) for stage in ("tuning", "tuned", "auto")}
    stages = [("tuning", 1000, 2.0**k) for k in range(factors)]
    stages += [(stage, seed, 1.0) for stage in ("tuned", "auto") for seed in range(seeds)]
    names, cells = [f"task-{i}" for i in range(tasks)], [{"kind": "epsilon", "value": 2.0**i} for i in range(budgets)]
    records = []
    for task, label, budget, (stage, seed, factor) in product(names, MANY, cells, stages):
        record, chance = patterns[stage], numbers.random(5).tolist()
        run = {**record["run"], "task": task, "label": label, "budget": budget, "seed": seed, "factor": factor}
        score = "accuracy" if stage != "tuning" else "nonprivate_validation_accuracy"
        found = dict(zip(("epsilon", "noise_multiplier", "lr", "seconds", score), chance, strict=True))
        if stage == "tuning":
            found["nonprivate_validation_curve"] = [[50 * k, *numbers.random(2).tolist()] for k in range(1, 21)]
        records.append({**record, **found, "id": Run.from_json(run).id, "run": run})
    (choice, *_), (price, *_) = content["summary"]["choices"], content["summary"]["prices"]
    where = [
        {"task": task, "budget": f"epsilon {budget['value']:g}", "method": label}
        for task, label, budget in product(names, MANY, cells)
    ]
    summary = {
        **content["summary"],
        "rows": aggregate_results.rows(map(read_record, records), "dp-sgd"),
        "choices": [{**choice, **each, "factor": 1.0} for each in where],
        "prices": [{**price, **each} for each in where],
        "failed": [],
    }
    specification = {
        **content["specification"],
        "problems": [{"task": task} for task in names],
        "contenders": [{"label": label} for label in MANY],
        "budgets": cells,
    }
    return {**content, "specification": specification, "summary": summary, "records": records}


@pytest.mark.slow
def test_a_large_comparison_is_a_page_below_five_megabytes_and_loses_nothing(content):
    large = enlarged(content, seeds=11)
    assert len(large["records"]) > 8400
    page = report.page(large)
    assert 1_000_000 < len(page.encode()) < 4_500_000
    body = re.search(r'<table id="table-runs".*?<tbody>(.*?)</tbody>', page).group(1)
    rows = [re.findall(r"<td([^>]*)>([^<]*)", row) for row in body.split("<tr>")[1:]]
    wanted = report._run_table(large)
    assert len(rows) == len(wanted)
    for cells, row in zip(rows, wanted, strict=True):
        for (kind, shown), value in zip(cells, row.values(), strict=True):
            exact = kind.partition("data-v")[2].lstrip("=") if "data-v" in kind else shown
            assert (
                (float(exact) == value)
                if isinstance(value, float)
                else (exact == ("" if value is None else str(value)))
            )


def test_a_page_that_is_too_large_is_said_to_be(folder, tmp_path, monkeypatch):
    def told():
        return CliRunner().invoke(main.app, ["report", str(folder), "--out", str(tmp_path / "r.html")]).stdout

    assert "more than" not in told()
    monkeypatch.setattr(cli_report, "LARGE", 50_000)
    assert "MB, more than the 0.05 MB a page should have" in " ".join(told().split())


def test_a_superseded_run_is_listed_and_in_no_row_and_no_curve(content):
    records = [
        {**each, "run": {**each["run"], "stage": "superseded"}, "curve": [[4, 0.123, 0.5]]}
        if each["run"]["stage"] == "tuned" and each["status"] == "done"
        else each
        for each in content["records"]
    ]
    marked = {**content, "records": records}
    assert {row["stage"] for row in report._run_table(marked)} == {"tuning", "auto", "superseded"}
    standing = [read_record(each) for each in records if each["run"]["stage"] != "superseded"]
    assert {row["rate"] for row in aggregate_results.rows(standing, "dp-sgd") if row["mean"] is not None} == {"auto"}
    drawn = [figure for figure in figures.figures(marked) if figure.key.startswith(("steps-", "spent-"))]
    assert drawn
    assert all(0.123 not in point for figure in drawn for series in figure.series for point in series.points)


def test_every_number_has_its_run_and_comes_from_the_records(content):
    rows = report._row_table(content)
    by_id = {record["id"][:8]: record for record in content["records"]}
    for row in rows:
        values = [by_id[name]["accuracy"] for name in row["its runs"].split()]
        assert len(values) == row["seeds"]
        if values:
            assert row["accuracy"] == pytest.approx(sum(values) / len(values))
    assert len(report._run_table(content)) == len(content["records"])


def test_a_score_on_private_examples_is_never_called_accuracy(content):
    trials = [r for r in content["records"] if r["run"]["stage"] == "tuning" and r["status"] == "done"]
    assert trials
    for record in trials:
        assert not {"accuracy", "curve"} & set(record)
        assert 0 <= record["nonprivate_validation_accuracy"] <= 1
    assert all("accuracy" in r for r in content["records"] if r["run"]["stage"] != "tuning" and r["status"] == "done")


def test_the_privacy_section_says_what_an_officer_asks(content):
    words = privacy(content)
    for needed in ("zero-out one row", "One row of the data", "poisson", "pld", "sampled-gaussian", "1e-05"):
        assert needed in words
    assert "released alone" in words
    assert "Validation accuracies" in words
    for line in content["records"][0]["assumptions"] if content["records"][0]["status"] == "done" else ():
        assert line["sentence"] in words.replace("&#x27;", "'")
    seeded = [
        {**record, "epsilon": None, "noise": "seeded", "reasons": ["known seed"]} for record in content["records"]
    ]
    assert "known seed" in privacy({**content, "records": seeded})
    assert "None. No run on this page has an epsilon" in privacy({**content, "records": seeded})
    assert "It rests on these assumptions" not in privacy({**content, "records": seeded})
    cyclic = [
        {**each, "sampling": "cyclic-poisson"} if each["status"] == "done" else each for each in content["records"]
    ]
    words = privacy({**content, "records": [*content["records"], *cyclic]})
    assert "poisson: at every step each example joins by its own coin flip" in words
    assert "cyclic-poisson: the data are split once into parts that take turns" in words
    watched = [{**each, "curve": [[1, 0.5, 1.0]] * 7} if "curve" in each else each for each in content["records"]]
    assert "looked at up to 7 times during a final run" in privacy({**content, "records": watched})


def test_a_bill_of_many_questions_is_told_as_a_range():
    def asked(*multipliers):
        rows = [{"kind": "sampled-gaussian", "rate": 0.04, "multiplier": z, "count": 25} for z in multipliers]
        run = {"task": "t", "label": "m", "budget": {"kind": "epsilon", "value": 3.0}}
        (row,) = report_privacy._charged([{"run": run, "epsilon": 2.9, "charged": rows}] * 2)
        assert row["runs"] == 2
        return row["questions asked of the data in one run"]

    assert asked(2.0) == "25 x sampled-gaussian (rate 0.04, multiplier 2)"
    assert asked(2.0, 1.0).count("25 x") == 2
    many = asked(*(12.5 * 0.99**i for i in range(100)))
    assert many == "2500 x sampled-gaussian with 100 different numbers (rate 0.04, multiplier 4.622 to 12.5)"


def test_many_methods_that_cannot_be_told_apart_are_counted_and_named_on_request():
    same = {f"method-{i}": (0.001 * i, -0.01, 0.01, "not distinguishable") for i in range(8)}
    words = report._findings(one_cell({**same, "bad": (-0.1, -0.11, -0.09, "worse")}))
    assert "8 methods are not distinguishable from dp-sgd</summary>" in words
    assert all(name in words for name in same)
    assert "No method is shown to be better. Worse than dp-sgd: bad by 10.0 points." in words
    both = report._findings(one_cell({"good": (0.1, 0.09, 0.11, "better"), "bad": (-0.1, -0.11, -0.09, "worse")}))
    assert "Better than dp-sgd: good by 10.0 points. Worse than dp-sgd: bad by 10.0 points." in both
    few = report._findings(one_cell(dict(list(same.items())[:2])))
    assert "method-0, method-1 are not distinguishable from dp-sgd." in few


def test_the_page_says_what_was_not_tested_and_why():
    short = one_cell({name: (0.1, 0.09, 0.11, "too few seeds to tell it") for name in "ab"})
    words = report._findings(short)
    assert "Too few seeds to tell a, b from dp-sgd: 1 rows take 6." in words
    assert "shown to be better" not in words
    assert "Holm over all 1 rows that are tested.  Not" in words, "nothing was chosen, so nothing is said of it"
    chosen = {**short, "summary": {**short["summary"], "choices": [{}]}}
    assert "the luck of the choice is in the intervals" in report._findings(chosen)
    earlier = one_cell({"a": (0.1, 0.09, 0.11, "+10 points; not tested: one choice of the rate serves every seed,")})
    earlier["summary"]["choices"], earlier["specification"]["choose"] = [{}], "once"
    words = report._findings(earlier)
    assert "Not tested, because each rate was chosen once for all seeds: a." in words
    assert "The choice of the rate is not in the tuned rows' intervals" in words


def test_choices_are_counted_by_cell(content):
    made = report._tuning(content)
    assert made.count("x auto") >= 4
    assert "anew for each of its final runs" in made
    assert " of 3<" in made
    once = {**content, "specification": {**content["specification"], "choose": "once"}}
    assert "once for all its final runs" in report._tuning(once)
    assert report._counted(["a", "b", "a"]) == "a (2); b (1)"
    assert report._counted(["a", "a"]) == "a"


def test_the_page_says_how_many_trials_each_method_had(content):
    assert "Every method had the same number of trials" in report._tuning(content)
    first, *rest = content["summary"]["choices"]
    uneven = {**content["summary"], "choices": [{**first, "trials": 5}, *rest]}
    assert "Every method had 2 to 5 trials" in report._tuning({**content, "summary": uneven})


@pytest.mark.slow
def test_commands(folder, tmp_path):
    run = CliRunner()
    made = run.invoke(
        main.app, ["report", str(folder), "--out", str(tmp_path / "r.html"), "--figures", str(tmp_path / "f")]
    )
    assert made.exit_code == 0, made.output
    assert (tmp_path / "r.html").stat().st_size > 10_000
    assert list((tmp_path / "f").glob("*.svg"))
    (tmp_path / "empty").mkdir()
    assert "holds no comparison" in run.invoke(main.app, ["report", str(tmp_path / "empty")]).stderr
    ComparisonFolder(tmp_path / "new").create(SMALL)
    assert "no finished run" in run.invoke(main.app, ["report", str(tmp_path / "new")]).stderr
    again = run.invoke(main.app, ["compare", "--resume", str(folder), "--json", "--workers", "1"])
    summary = json.loads(again.stdout)
    assert summary["done"] == 2 * 2 * (2 * 3 + 3 + 3)
    assert {row["label"] for row in summary["failed"]} == {"bad"}


def test_the_report_of_a_reproduction_sets_the_paper_beside_it(folder, tmp_path):
    copied = tmp_path / "again"
    shutil.copytree(folder, copied)
    (copied / "preset.json").write_text('{"preset": "fo-table3", "small": true}')
    page = write_report(copied, None, None, None).read_text()
    for words in ('id="paper"', "0.3654", "Made with --small", paper_presets.find("fo-table3").notes[1]):
        assert words in page
    (copied / "preset.json").write_text('{"preset": "br-fig7", "small": true}')  # its dots are of any contender
    page = write_report(copied, None, None, None).read_text()
    assert "On the paper's own axes" in page
    assert 'id="figure-paper-setting-accuracy-' in page
    assert 'id="paper"' not in write_report(folder, tmp_path / "plain.html", None, None).read_text()
