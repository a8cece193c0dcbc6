"""Is a forged record of a comparison found, and does a real one raise no alarm?"""

import json
import shutil
from dataclasses import replace
from functools import cache

import pytest

from commands import vestige
from comparisons import AUTO, TINY, files
from vestige import accounting
from vestige.compare import runner
from vestige.compare.folder import ComparisonFolder
from vestige.compare.specification import Contender
from vestige.compare.verify import _contradiction, _cost, _methods, verify_comparison
from vestige.priced_questions import Question
from vestige.run_records import PrivacyTarget, completed


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison with stacked runs, runs made alone, a filtered one among them, and one that cannot be afforded."""
    specification = replace(
        TINY,
        contenders=(Contender("dp-sgd", "dp-sgd"), Contender("dp-is", "dp-is"), Contender("br", "dpsgd-br")),
        budgets=(PrivacyTarget("epsilon", 3.0), PrivacyTarget("epsilon", 90.0)),
        rates=("auto",),
        seeds=(0,),
    )
    return runner.compare(tmp_path_factory.mktemp("compared") / "c", specification)


def test_every_epsilon_of_a_comparison_is_what_its_charges_cost(compared):
    records = files(compared).values()
    failed = sum(record["status"] == "failed" for record in records)
    assert any(record.get("schedule") == "filtered" for record in records)
    verdict = verify_comparison(compared.path)
    assert (verdict.verified, verdict.failed_runs, verdict.wrong) == (len(records) - failed, failed, {})
    assert verdict.largest_epsilon == max(record["epsilon"] for record in records if record["status"] == "done")


FORGERIES = {
    "a smaller epsilon": (lambda record: record.update(epsilon=record["epsilon"] * 0.99), "states epsilon"),
    "no epsilon": (lambda record: record.update(epsilon=None), "states epsilon"),
    "a question less": (lambda record: record["charged"][0].update(count=5), "lists 5"),
    "more noise": (lambda record: record["charged"][0].update(multiplier=99.0), "states epsilon"),
    "another run": (lambda record: record["run"].update(seed=77), "hash"),
    "noise that was known": (lambda record: record.update(noise="seeded"), "noise was seeded"),
    "shuffled data": (lambda record: record.update(sampling="shuffled"), "states epsilon"),
    "no charges": (lambda record: record.pop("charged"), "'charged'"),
    "half a file": (None, "JSONDecodeError"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_record_is_found(compared, tmp_path, forgery):
    forge, told = FORGERIES[forgery]
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    victim = next(key for key, each in files(copy).items() if each["run"]["method"] == "dp-sgd")
    path = copy.runs / f"{victim}.json"
    if forge is None:
        path.write_text(path.read_text()[:100])
    else:
        record = json.loads(path.read_text())
        forge(record)
        path.write_text(json.dumps(record))
    wrong = verify_comparison(copy.path).wrong
    assert [told in fault for fault in wrong.values()] == [True]


def test_a_record_that_states_honestly_more_than_its_budget_is_found(compared, tmp_path):
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    record = next(each for each in files(copy).values() if each["run"]["method"] == "dp-sgd")
    record["charged"][0]["multiplier"] *= 0.8
    asked = {Question.from_json(row): row["count"] for row in record["charged"]}
    record["epsilon"] = accounting.epsilon(asked, record["run"]["delta"])
    (copy.runs / f"{record['id']}.json").write_text(json.dumps(record))
    assert "more than its budget" in verify_comparison(copy.path).wrong[record["id"]]


def test_a_record_whose_epsilon_means_more_than_it_says_is_found(compared, tmp_path):
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    record = next(each for each in files(copy).values() if each["run"]["method"] == "dp-sgd")
    record["attacker_accuracy"] -= 0.01
    (copy.runs / f"{record['id']}.json").write_text(json.dumps(record))
    assert "attacker accuracy" in verify_comparison(copy.path).wrong[record["id"]]


def test_a_filtered_record_that_spent_more_than_its_filter_is_found(compared, tmp_path):
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    record = next(each for each in files(copy).values() if each.get("schedule") == "filtered")
    for row in record["charged"]:
        record["asked"] += 10**4 * row["count"] - row["count"]
        row["count"] *= 10**4
    (copy.runs / f"{record['id']}.json").write_text(json.dumps(record))
    assert "filter refuses" in verify_comparison(copy.path).wrong[record["id"]]


def test_verify_knows_a_comparison_from_a_run(compared, tmp_path):
    code, out, _ = vestige("verify", str(compared.path))
    assert code == 0
    assert "runs cost what their records state" in out
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    path = next(path for path in copy.runs.iterdir() if json.loads(path.read_text())["status"] == "done")
    path.write_text(json.dumps({**json.loads(path.read_text()), "epsilon": 0.1}))
    code, out, errors = vestige("verify", str(copy.path), "--json")
    assert code == 1
    assert json.loads(out)["wrong"] == {path.stem: json.loads(out)["wrong"][path.stem]}
    assert f"runs/{path.name}: states epsilon 0.1" in errors
    assert "NOT VERIFIED: 1 records do not hold" in errors


def _cheaper(record, **change):
    """Charges that were edited, with the epsilon that they cost."""
    record["charged"][0].update(change)
    asked = {Question.from_json(row): row["count"] for row in record["charged"]}
    record["epsilon"] = accounting.epsilon(asked, record["run"]["delta"])
    record["asked"] = sum(asked.values())


CONTRADICTIONS = {
    "fewer questions": (lambda record: _cheaper(record, count=1), "lists other questions than 6 steps"),
    "a smaller rate": (lambda record: _cheaper(record, rate=0.0497), "lists other questions than 6 steps"),
    "more noise in the charges": (
        lambda record: _cheaper(record, multiplier=1.001 * record["noise_multiplier"]),
        "lists other questions than 6 steps",
    ),
    "more noise": (lambda record: record.update(noise_multiplier=99.0), "lists other questions than 6 steps"),
    "more noise throughout": (
        lambda record: (record.update(noise_multiplier=5.0), _cheaper(record, multiplier=5.0)),
        "less than noise that was fitted to its budget",
    ),
    "another delta": (lambda record: record.update(delta=1e-12), "states delta 1e-12"),
    "another budget": (lambda record: record.update(budget=1.0), "states budget 1.0"),
    "another epsilon of secret noise": (
        lambda record: record.update(epsilon_if_noise_were_secret=0.1),
        "states epsilon if noise were secret 0.1",
    ),
    "fewer steps": (lambda record: record.update(steps=3), "finished after 3 steps"),
    "an early stop": (
        lambda record: (_cheaper(record, count=3), record.update(steps=3, stopped="budget")),
        "would have paid for step 4",
    ),
    "a filter": (lambda record: record.update(schedule="filtered", filter_epsilon=3.0), "cannot be priced"),
}


def _forged(compared, tmp_path, chosen, forge):
    copy = ComparisonFolder(shutil.copytree(compared.path, tmp_path / "c"))
    record = next(each for each in files(copy).values() if each["status"] == "done" and chosen(each))
    forge(record)
    (copy.runs / f"{record['id']}.json").write_text(json.dumps(record))
    return verify_comparison(copy.path).wrong[record["id"]]


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_a_record_that_contradicts_its_run_is_found(compared, tmp_path, contradiction):
    forge, told = CONTRADICTIONS[contradiction]
    assert told in _forged(compared, tmp_path, lambda each: each["run"]["method"] == "dp-sgd", forge)


def _with_one_charge(record):
    record["charged"] = [{**record["charged"][0], "count": 1}]
    record["asked"] = 1


def _with_a_smaller_filter(record):
    _with_one_charge(record)
    record["epsilon"] = record["filter_epsilon"] = 0.9 * record["filter_epsilon"]


FILTERED = {
    "a smaller filter": (_with_a_smaller_filter, "states a filter of epsilon"),
    "other expectations": (
        lambda record: record["filter_expects"][0].update(rate=0.04),
        "expects other questions than dpsgd-br asks",
    ),
    "no filter": (lambda record: _cheaper(record) or record.update(schedule="fixed"), "are filtered"),
    "more steps": (lambda record: record.update(steps=99), "after 99 steps"),
    "fewer questions": (_with_one_charge, "lists 1 questions"),
}


@pytest.mark.parametrize("contradiction", FILTERED)
def test_a_filtered_record_that_contradicts_its_run_is_found(compared, tmp_path, contradiction):
    forge, told = FILTERED[contradiction]
    assert told in _forged(compared, tmp_path, lambda each: each.get("schedule") == "filtered", forge)


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """Noise that is given, a paper's, or of a known seed; in parts; and some that stop when their budget is spent."""
    folder = tmp_path_factory.mktemp("odd")
    field = (
        Contender("dp-sgd", "dp-sgd"),
        Contender("fo", "fo-dp-sgd", {"groups": "layers"}),
        Contender("is", "dp-is"),
    )
    noises = PrivacyTarget("noise_multiplier", 1.3), PrivacyTarget("paper_sigma", 1.3)
    early = {"sigma_t": 0.8, "sigma_v": 0.5, "accounting": "every-trial"}
    made = {
        "noise": replace(AUTO, contenders=field, budgets=noises),
        "seeded": replace(AUTO, contenders=field[1:], reproducible=True),
        "parts": replace(AUTO, contenders=field[:2], physical_batch=16),
        "early": replace(
            AUTO,
            contenders=(Contender("dpsur", "dpsur", early), Contender("br", "dpsgd-br", {**early, "progress": "none"})),
            budgets=(PrivacyTarget("epsilon", 14.0),),
            steps=60,
        ),
    }
    return cache(lambda name: runner.compare(folder / name, made[name]))


@pytest.mark.parametrize("name", ["noise", "seeded", "parts", "early"])
@pytest.mark.everyday("noise", "parts")
def test_real_records_raise_no_alarm(odd, name):
    records = odd(name).records().values()
    assert len(completed(records)) == len(records)
    assert name != "early" or all(record.stopped == "budget" for record in records)
    verdict = verify_comparison(odd(name).path)
    assert (verdict.verified, verdict.wrong) == (len(records), {})


@pytest.mark.parametrize("kind", ["noise_multiplier", "paper_sigma"])
def test_noise_other_than_the_run_was_given_is_found(odd, tmp_path, kind):
    def forge(record):
        record["noise_multiplier"] *= 1.1
        for row in record["charged"]:
            row["multiplier"] *= 1.1
        _cheaper(record)

    told = _forged(odd("noise"), tmp_path, lambda each: each["run"]["budget"]["kind"] == kind, forge)
    assert "states noise multiplier" in told


def test_a_smaller_epsilon_of_noise_from_a_known_seed_is_found(odd, tmp_path):
    told = _forged(odd("seeded"), tmp_path, bool, lambda record: record.update(epsilon_if_noise_were_secret=0.5))
    assert "states epsilon if noise were secret 0.5" in told


EARLY = {
    "fewer steps": (lambda record: record.update(steps=2), "lists other questions than 2 of the 60 steps"),
    "earlier": (
        lambda record: ([row.update(count=2) for row in record["charged"]], _cheaper(record), record.update(steps=2)),
        "would have paid for step 3",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("contradiction", EARLY)
def test_a_stop_that_the_budget_does_not_explain_is_found(odd, tmp_path, contradiction):
    forge, told = EARLY[contradiction]
    assert told in _forged(odd("early"), tmp_path, bool, forge)


@pytest.mark.parametrize("bands", [2, 4, 5])
@pytest.mark.nightly("5")
def test_banded_noise_is_verified_with_the_bands_of_now_or_of_its_version(tmp_path, bands):
    """A record stores the options it was given: none, where the number of bands was left to the version of then."""
    contenders = (Contender("dp-bandmf", "dp-bandmf", {"bands": bands}),)
    wanted = replace(AUTO, contenders=contenders, baseline="dp-bandmf", steps=12, sample_rate=0.2)
    (record,) = completed(runner.compare(tmp_path / "c", wanted).records().values())
    unsaid = replace(record, run=replace(record.run, options={}))
    fault = _contradiction(unsaid, _cost(json.dumps(record.charged), 1e-5, json.dumps(record.terms.to_json())))
    # epsilon sqrt(n) / k = 3 sqrt(12) / 2.4 = 4.3, and four was the default before
    assert (fault is None) == (bands == 4), fault
    later = replace(unsaid, run=replace(unsaid.run, budget=PrivacyTarget("epsilon", 8.0)))
    assert {method.noise.bands for method in _methods(later)} == {5, 4}
