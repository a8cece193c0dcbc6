"""Do the studies of bench/ say what their runs say? On made-up records whose answer is known."""

import gzip
import json
import sys
import warnings
from argparse import Namespace
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode
from torch.utils.data import DataLoader, TensorDataset

import vestige
from comparisons import AUTO, fake
from vestige.compare import paper_presets, run_grid
from vestige.compare.execute_run import Machine
from vestige.compare.statistics import tells
from vestige.methods.registry import METHODS
from vestige.optim.spectral import tail_exponent
from vestige.run_records import FailedRun, PrivacyTarget, Run


@pytest.fixture(scope="module")
def study(bench):
    return bench("learning_rate")


def records(table, **changes):
    """Tuning runs of one setting: {factor: {seed: accuracy}}."""
    run = replace(run_grid.due(AUTO, run_grid.grid_of(AUTO), {})[0], task="t", steps=10, sample_rate=0.1, label="m")
    run = replace(run, stage="tuning", **changes)
    return [
        fake(replace(run, factor=factor, seed=seed), accuracy)
        for factor, by_seed in table.items()
        for seed, accuracy in by_seed.items()
    ]


def test_a_failure_that_both_seeds_show_is_named(study):
    (row,) = study.losses(records({0.5: {1: 0.50, 2: 0.54}, 1.0: {1: 0.40, 2: 0.42}, 2.0: {1: 0.30, 2: 0.30}}))
    assert row["best_factor"] == 0.5
    assert row["at_edge"]
    assert row["loss"] == pytest.approx(0.52 - 0.41)
    assert row["honest"] == pytest.approx(((0.50 - 0.40) + (0.54 - 0.42)) / 2)
    page = study.render([row])
    assert "m on t, epsilon 3, 10 steps at q 0.1: too large by 2 or more; 41.0 where 52.0 was to be had" in page


def test_a_gain_that_only_the_choosing_seed_shows_is_not(study):
    """Each seed has a lucky rate of its own: the best mean beats 1, but neither seed's choice helps the other."""
    table = {0.5: {1: 0.50, 2: 0.30}, 1.0: {1: 0.39, 2: 0.39}, 2.0: {1: 0.30, 2: 0.50}}
    (row,) = study.losses(records(table))
    assert row["loss"] == pytest.approx(0.01)
    assert row["honest"] == pytest.approx(-0.09)
    assert "No setting loses a point that a second seed confirms" in study.render([row])


def test_failed_runs_and_given_rates_are_no_evidence(study):
    made = records({0.5: {1: 0.5}, 1.0: {1: 0.4}, 2.0: {1: 0.3}})
    made.append(FailedRun(replace(made[0].run, factor=4.0), "?"))
    made.append(fake(replace(made[0].run, lr=7.0, factor=1.0), 0.9))
    (row,) = study.losses(made)
    assert set(row["accuracy_by_factor"]) == {"0.5", "1", "2"}
    assert row["auto"] == 0.4
    assert row["honest"] is None


def test_what_another_constant_would_lose(study):
    one = records({0.5: {1: 0.5}, 1.0: {1: 0.4}, 2.0: {1: 0.3}})
    other = records({0.5: {1: 0.1}, 1.0: {1: 0.2}, 1.4: {1: 0.6}, 2.0: {1: 0.5}}, task="u")
    page = study.render(study.losses([*one, *other]))
    assert "| 2 settings | 0.5 | 1 | 2 |" in page
    assert "| | 25.00 / 50.0 | 25.00 / 40.0 | 15.00 / 20.0 |" in page
    assert "| 1 settings | 0.5 | 1 | 1.4 | 2 |" in page
    assert "| | 50.00 / 50.0 | 40.00 / 40.0 | 0.00 / 0.0 | 10.00 / 10.0 |" in page


def test_the_plot_is_over_settings_of_one_grid(study):
    rows = [
        {"id": index, "accuracy_by_factor": dict.fromkeys(grid, 0.5)}
        for index, grid in enumerate(["abc", "abd", "abd", "ab", "ab", "ab"])
    ]
    assert [row["id"] for row in study.of_one_grid(rows)] == [1, 2]


def test_settings_of_few_methods_are_rows(study):
    table = {0.5: {1: 0.5}, 1.0: {1: 0.4}, 2.0: {1: 0.3}}
    several = [each for n in range(study.FEW + 1) for each in records(table, label=f"m{n}")]
    alone = records(table, task="u")
    page = study.render(study.losses([*several, *alone]))
    assert "| method | t, 10 steps, epsilon 3 |" in page
    assert "| m3 | 10.0 (0.5*) |" in page
    assert "| setting | m |" in page
    assert "| u, 10 steps, epsilon 3 | 10.0 (0.5*) |" in page


def test_every_comparison_of_the_documents_can_be_made(bench):
    arena = bench("arena")
    for shown in arena.SHOWN.values():
        made = shown.specification(None, small=False)
        rows = len(made.problems) * len(made.budgets) * (len(made.contenders) - 1) * len(made.rates)
        assert tells(len(made.seeds), rows)
        assert made.choose == "each seed"
    everyone = {contender.method for contender in arena.SHOWN["cifar10"].specification(None, False).contenders}
    assert everyone == set(METHODS) - {"sa-dp-sgd"}  # which is dp-sam under another name


@pytest.mark.slow
def test_the_pool_names_each_run_once_and_everything_that_its_parts_want(bench):
    reproduction = bench("reproduction")
    plan = reproduction.parts("nowhere", small=False)
    wanted = reproduction.due(plan, {})
    assert set(wanted) == {key for part in plan for key in part.wanted({})}
    assert len(wanted) < sum(len(part.wanted({})) for part in plan)  # presets share runs
    shared = {part.name: set(part.wanted({})) for part in plan}
    assert shared["fo-fig3"] < shared["fo-fig2"]
    assert shared["fo-fig6"] == shared["fo-fig5"]
    done = {key: None for key in shared["fo-fig2"]}
    assert not set(reproduction.due(plan, {**done})) & shared["fo-fig3"]
    svhn = next(part for part in plan if part.name == "svhn").wanted({})
    assert {run.method for run in svhn.values()} == set(METHODS) - {"sa-dp-sgd"}  # which is dp-sam under another name
    curves = {run.label for key, run in svhn.items() if key in shared["fo-fig1"]}
    assert {"dp-sam", "dp-is", "dp-adam"} <= curves  # wanted with a curve by a figure: made once, with it


# --- selective updates -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def selective(bench):
    return bench("selective")


def test_selective_tables_say_how_many_runs_stand_behind_a_number(selective, tmp_path):
    cell = {"dataset": "mnist", "method": "dpsur", "epsilon": 2}
    rows = [{**cell, "seed": 0, "accuracy": 0.98, "accuracy_at_claim": 0.99}, {**cell, "seed": 1, "accuracy": 0.97}]
    text = selective.tables(rows, {})
    assert "| dpsur | not run [97.95] | 97.50 (2) [98.80] | not run [98.86] | not run [98.95] |" in text
    assert "| dpsur, until the claim | not run [97.95] | 99.00 (1) [98.80] |" in text
    assert "| Fashion-MNIST |" not in text.split(selective.PARTS)[0]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{selective.BEGIN}\nold\n{selective.END}\nafter\n")
    for _ in range(2):
        selective.write_into(page, text)
        assert page.read_text() == f"before\n{selective.BEGIN}\n\n{text}\n\n{selective.END}\nafter\n"


def test_cells_that_are_not_run_again_stay_on_the_page(selective, tmp_path):
    page = tmp_path / "page.md"
    rows = [
        {
            "dataset": "mnist",
            "method": method,
            "epsilon": 1,
            "seed": 0,
            "accuracy": 0.9,
            "updates": 1200,
            "trials": 4000,
        }
        for method in ("dpsur", "dpsgd-br, buffer 3")
    ]
    before = selective.tables(rows, {})
    page.write_text(f"{selective.BEGIN}\n\n{before}\n\n{selective.END}\n")
    assert selective.tables([], selective.of_page(page)) == before
    assert "| dpsgd-br, buffer 3 | 90.00 (1): 1,200 of 4,000 | not run |" in before
    again = selective.tables([{**rows[0], "accuracy": 0.8}], selective.of_page(page))
    assert "| dpsur | 80.00 (1) [97.95] |" in again
    assert again.replace("80.00", "90.00") == before
    page.write_text(page.read_text().replace("90.00 (1) [97.95]", "90.00 (3) [97.95]"))
    assert "| dpsur | 90.00 (3) [97.95] |" in selective.tables([{**rows[0], "accuracy": 0.8}], selective.of_page(page))


def test_selective_cells_come_most_wanted_first(selective, tmp_path):
    for file in selective.DATA.values():
        (tmp_path / file).touch()
    everything = {"datasets": list(selective.DATA), "methods": selective.METHODS, "epsilons": selective.EPSILONS}
    options = Namespace(data=tmp_path, seeds=3, **everything)
    known = {selective.Cell("mnist", "dpsur", 4, 0)}
    cells = selective.missing(options, known, {selective.Cell("mnist", "dpsgd", 1, 0): 999.0})
    assert len(cells) == len(set(cells)) == 3 * 6 * 4 * 3 + 4 * 4 * 3 - 1
    options.methods = list(selective.BUFFERS)
    assert len(selective.missing(options, known, {})) == 4 * 3 * 3, "other buffers at epsilon 1 alone"
    assert cells[0] == selective.Cell("mnist", "dpsgd", 1, 0), "of equals the longest comes first"
    first = {
        kind: min(i for i, cell in enumerate(cells) if kind in (cell.dataset, cell.method))
        for kind in ("dpsur", "dpsgd-br", selective.STILL, "imdb", "cifar10")
    }
    assert list(first.values()) == sorted(first.values())


def test_other_decay_factors_are_another_method(selective):
    given = selective.Setting(Path(), "cpu", "bookkeeping", "noisy-loss", "trial-level", None, False, 0.0)
    decays = {
        name: selective.decay_of(selective.method_of(selective.Cell("mnist", name, 1, 0), given))
        for name in (*selective.METHODS, *selective.BUFFERS)
    }
    for name in selective.DECAYING:
        assert decays.pop(name) == [0.999, 0.9999]
    assert set(decays.values()) == {None}


def test_the_study_of_finetuning_tells_private_from_plain(bench, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    study = bench("finetuning")
    monkeypatch.setattr(sys, "argv", ["finetuning.py", "--smoke", "--device", "cpu", "--data", str(tmp_path)])
    study.main()
    assert capsys.readouterr().out.startswith("skipped: there is no ")

    reviews = [
        {"text": f"film {number} is {('dull', 'fine')[number % 2]}", "label": number % 2} for number in range(240)
    ]
    with gzip.open(tmp_path / "imdb.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(review) + "\n" for review in reviews + reviews[:10])
    known = study.halves(tmp_path / "imdb.jsonl.gz", study.SMOKE)
    texts = [[text for text, _ in part] for part in (known.public, known.tested, known.private)]
    assert [len(part) for part in texts] == [80, 40, 120]
    assert len(set().union(*texts)) == 240  # nobody is in two parts

    numbers = tmp_path / "numbers.json"
    more = ["--tasks", "causal-lm", "--epsilons", "8", "--epochs", "1", "--json", str(numbers)]
    monkeypatch.setattr(sys, "argv", [*sys.argv, *more])
    study.main()
    rows = json.loads(numbers.read_text())["rows"]
    assert [row["row"] for row in rows] == ["before", "without privacy", "epsilon 8"]
    assert 7.9 < rows[-1]["epsilon"] <= 8
    assert rows[-1]["time"] > 0
    assert "| causal-lm | epsilon 8 | perplexity " in capsys.readouterr().out


# --- choosing a constant privately -----------------------------------------------------------------------------------


def test_the_noise_of_private_trials_leaves_the_budget_whole(bench):
    """On whole data every answer is Gaussian, and all compose to one: by the closed form of Balle & Wang 2018."""
    private = bench("private_tuning")
    alone, after = private.noise_multipliers(private.Setting("any", 3.0, 10, 1.0), trials=2, noisier=3.0)

    def delta(shift):
        a, b = shift / 2 - 3.0 / shift, -shift / 2 - 3.0 / shift
        return norm.cdf(a) - np.exp(3.0) * norm.cdf(b)

    whole = 10 / after**2 + 2 * 10 / (3 * after) ** 2 + 2 / private.COUNT_NOISE**2
    assert delta(np.sqrt(whole)) == pytest.approx(private.DELTA, rel=0.02)
    assert delta(np.sqrt(10) / alone) == pytest.approx(private.DELTA, rel=0.02)
    assert after > 1.05 * alone


def test_the_few_epoch_comparison_asks_for_its_regime_and_tables_its_runs(bench):
    few = bench("few_epochs")
    wanted = few.specification(["digits-mlp"], few.FIELD, None, 3)
    assert wanted.steps * wanted.sample_rate == pytest.approx(3)
    run = replace(run_grid.due(AUTO, run_grid.grid_of(AUTO), {})[0], task="t", label="m", factor=1.0)
    found = [fake(replace(run, stage="auto", seed=seed), score) for seed, score in ((0, 0.5), (1, 0.6))]
    found += [fake(replace(run, stage="tuned", factor=2.0), 0.7), fake(replace(run, stage="tuning"), 0.1)]
    assert few.table(found).splitlines()[2] == "| t | m | 70.0 | 2 | 55.0 ± 7.1 |"


def trained(model, batch):
    options = {"method": "dp-sgd", "noise_multiplier": 1.0, "delta": 1e-5, "lr": 0.1}
    records = iter(vestige.train(model, cross_entropy, batch, sample_rate=1.0, steps=10**6, **options))
    return lambda: next(records)


def looped(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*batch), batch_size=len(batch[1]))
    _, _, loader = vestige.PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    batches = chain.from_iterable(repeat(loader))

    def step():
        x, y = next(batches)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


@pytest.mark.parametrize(("way", "recordings"), [(looped, 3), (trained, 1)])
def test_the_hosts_share_is_timed_on_steps_that_are_replayed(bench, monkeypatch, way, recordings):
    """As on a GPU: recorded, replayed, and nothing done in a replay once times are taken."""
    host, made = bench("host"), []

    class Counted(host.Still):
        def __init__(self, *args):
            self.runs = self.replays = 0
            super().__init__(self.count(args[0]), *args[1:])
            made.append(self)

        def count(self, work):
            def run():
                self.runs += 1
                work()

            return run

        def replay(self):
            self.replays += 1
            super().replay()

    monkeypatch.setattr(host, "Still", Counted)
    (taken,) = host.measured({"way": way}, "8-8-2 [4]", rounds=2, steps=5).values()
    assert len(taken) == 2
    assert len(made) == recordings
    assert all(each.replays - each.runs >= 10 - 1 for each in made)  # recording it was a run


class Launches(TorchDispatchMode):
    """Every operation that is no view: on a GPU a kernel each."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function is not torch.ops.aten.detach.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("way", "most"), [(trained, 14), (looped, 28)])
def test_a_step_launches_no_more_than_it_did(bench, way, most):
    """Beside its recordings and the noise. On a CPU each of four parameters moves by an operation of its own."""
    host = bench("host")
    torch.manual_seed(0)
    with host.captured_still(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build, shape, classes, rows = host.MODELS["8-8-2 [4]"]
        step = way(build(), (torch.randn(rows, *shape), torch.randint(classes, (rows,))))
        for _ in range(20):
            step()
        host.Still.still = True
        with Launches() as launches:
            step()
        while torch._C._len_torch_dispatch_stack():  # a loop that is replayed stays on, and was put on above this one
            _pop_mode()
    assert launches.count <= most


# --- records ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kept(bench):
    return bench("records")


def options_of(tmp_path, **changes):
    given = {"data": tmp_path, "device": "cpu", "only": [], "seeds": 2, "full": False, "runs": tmp_path}
    return Namespace(**{**given, "bfloat16": False, **changes})


def test_records_come_in_order_seed_by_seed_and_the_long_ones_only_if_asked(kept, tmp_path):
    rows = list(kept.due(options_of(tmp_path)))
    assert [seed for _, seed in rows] == sorted(seed for _, seed in rows)
    assert not any(row.full for row, _ in rows)
    assert sum(row.broken for row, _ in rows) == 1
    assert any(row.full for row, _ in kept.due(options_of(tmp_path, full=True)))
    (only,) = {row.name for row, _ in kept.due(options_of(tmp_path, only=["cifar10-wrn40-4"]))}
    assert only == "cifar10-wrn40-4-eps8"
    assert len({row.name for row in kept.ROWS}) == len(kept.ROWS)


def test_every_record_is_a_recipe_at_its_epsilon(kept, tmp_path):
    for row in kept.ROWS:
        job = kept.job_of(row, 3, options_of(tmp_path))
        assert (job.recipe, job.epsilon, job.seed, job.delta) == (row.recipe, row.epsilon, 3, 1e-5)
        large = kept.job_of(row, 0, options_of(tmp_path, device="cuda", bfloat16=True))
        if large.augment is not None:
            batch = large.sample_rate * 50_000
            parts = -(-(batch + 4 * batch**0.5) // large.physical_batch)
            assert parts == max(1, -(-batch * large.augment // kept.ROWS_AT_ONCE))
        assert large.bfloat16 == (large.augment is not None)


def test_a_record_that_was_cut_short_goes_on_is_verified_and_stands_in_the_table(kept, tmp_path):
    lines = [
        json.dumps({"split": split, "text": f"a {('bad', 'good')[label]} film", "label": label})
        for split in ("train", "test")
        for label in (0, 1)
        for _ in range(30)
    ]
    (tmp_path / "imdb.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    given = options_of(tmp_path, runs=tmp_path / "runs")
    given.runs.mkdir()
    row = kept.ROWS[0]
    spent = kept.Clock(0.0)
    assert kept.performed(row, 0, given, spent) is None
    result = kept.performed(row, 0, given, kept.Clock(None))
    assert result["verified"]
    assert result["attempts"] == 2
    assert result["epsilon"] <= 1
    assert kept.performed(row, 0, given, spent) == result  # a finished run is read, not run again
    table = kept.table([{**result, "accuracy": 1.0}, {**result, "seed": 1, "accuracy": 0.5}])
    assert "| IMDb | 1 | `imdb-words` | 75.0 (50.0 to 100.0, 2 seeds) | 66 | 66.91 (DPSGD-BR) | no (refuted) |" in table
    (tmp_path / "runs" / "imdb-words-eps1-seed0" / "ledger.jsonl").write_text("")
    with pytest.raises(Exception, match="ledger"):
        kept.performed(row, 0, given, spent)


def test_rows_of_a_page_stay_until_they_are_run_again(kept, tmp_path):
    """A row that is broken and resumed has the name and budget of one that is not: they are told apart."""
    rows = [row for row in kept.ROWS if row.recipe == "fmnist-scattering-linear"]
    assert [row.broken for row in rows] == [False, True]
    made = [
        {"row": row.name, "accuracy": 0.8, "views_per_second": 10, "seconds": 60.0, "device": "cpu", "attempts": 2}
        for row in rows
    ]
    page = tmp_path / "page.md"
    page.write_text(f"before\n\n{kept.table(made)}\n| mine | and only mine |\n\nafter\n")
    kept.write_into(page, [])
    assert page.read_text() == f"before\n\n{kept.table(made)}\n| mine | and only mine |\n\nafter\n"
    kept.write_into(page, [{**made[1], "accuracy": 0.9}])
    whole, broken = page.read_text().splitlines()[4:6]
    assert "| 80.0 |" in whole
    assert "2 attempts | 90.0 |" in broken
    kept.write_into(page, [{**made[0], "seed": seed} for seed in (0, 1)])
    kept.write_into(page, [{**made[0], "accuracy": 0.5}])
    assert "| 80.0 (80.0 to 80.0, 2 seeds) |" in page.read_text(), "one seed does not take the place of two"
    with pytest.raises(SystemExit, match="no table of records"):
        kept.write_into(tmp_path / "none.md", [])


@pytest.mark.parametrize(
    "change",
    [
        {"verified": False},
        {"epsilon": 99.0},
        {"accuracy": 69.4},
        {"accuracy": float("nan")},
        {"row": "typo"},
        {"seed": 1},
    ],
)
@pytest.mark.everyday("change0")
def test_a_page_of_records_takes_no_result_that_is_none(kept, tmp_path, change):
    good = {"row": "imdb-words-eps1", "seed": 0, "verified": True, "epsilon": 0.99, "accuracy": 0.7}
    file = tmp_path / "records.json"
    file.write_text(json.dumps({"results": [good, {**good, "seed": 1}]}))
    assert len(kept.results_of(file)) == 2
    file.write_text(json.dumps({"results": [{**good, **change}, {**good, "seed": 1}]}))
    with pytest.raises(SystemExit, match="no results of this script"):
        kept.results_of(file)
    file.write_text("{")
    with pytest.raises(SystemExit, match="no results of this script"):
        kept.results_of(file)


@pytest.mark.parametrize(
    "change", [{"examples": 500}, {"accounting": "every-trial"}, {"progress": "none"}, {"epsilon_valid": 9.9}]
)
def test_a_page_of_selective_updates_takes_whole_runs_alone(selective, change):
    row = {"dataset": "mnist", "method": "dpsur", "epsilon": 1, "seed": 0, "accuracy": 0.9, "epsilon_valid": 1.0}
    selective.require_whole([row, {**row, "examples": 60_000, "progress": "noisy-loss", "accounting": "trial-level"}])
    with pytest.raises(SystemExit):
        selective.require_whole([{**row, **change}])


@pytest.mark.parametrize("rows", [[{"accuracy": 2.0}], [{}, {}], [{"method": "typo"}], [{"accuracy": float("nan")}]])
def test_results_of_selective_updates_are_of_cells(selective, tmp_path, rows):
    row = {"dataset": "mnist", "method": "dpsur", "epsilon": 1, "seed": 0, "accuracy": 0.9, "epsilon_valid": 1.0}
    file = tmp_path / "selective.json"
    file.write_text(json.dumps([{**row, **change} for change in rows]))
    with pytest.raises(SystemExit, match="no results of this script"):
        selective.results_of(file)
    file.write_text(json.dumps([row]))
    assert selective.results_of(file) == [row]


@pytest.mark.slow
def test_the_study_of_synthetic_reviews_goes_on_where_it_stopped(bench, tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    study = bench("synthesize_imdb")
    reviews = [
        {"text": f"film {number} is {('dull', 'fine')[number % 2]}", "label": number % 2} for number in range(240)
    ]
    with gzip.open(tmp_path / "imdb.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(review) + "\n" for review in reviews)
    out = tmp_path / "out"
    words = ["--smoke", "--device", "cpu", "--data", str(tmp_path), "--out", str(out), "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["synthesize_imdb.py", *words, "--epsilons", "8"])
    study.main()
    before = json.loads((out / "results.json").read_text())
    assert 7.9 < before[0]["verified_epsilon"] <= 8
    monkeypatch.setattr(sys, "argv", ["synthesize_imdb.py", *words, "--epsilons", "8", "none"])
    study.main()
    found = json.loads((out / "results.json").read_text())
    assert found[0] == before[0]
    assert [row["epsilon"] for row in found] == ["8", "none"]
    assert "| none | 0 | 1 |" in capsys.readouterr().out


def test_the_table_of_synthetic_rows_has_means_over_seeds(bench):
    study = bench("synthesize_tables")
    row = {"set": "s", "method": "m", "epsilon": 1.0, "pair_error": 0.1, "seconds": 2.0}
    found = [{**row, "seed": seed, "accuracy": 0.5 + seed / 10} for seed in range(3)]
    assert "| s | 1 | m | 60.0 ± 10.0 | 0.100 | 2.0 |" in study.table(found)
    assert "| failed |" in study.table([{"set": "s", "method": "m", "epsilon": 1.0, "seed": 0, "error": "slow"}])


# --- the papers --------------------------------------------------------------------------------------------------------


def test_every_piece_of_the_papers_is_a_preset_and_each_run_is_named_once(bench):
    papers = bench("papers_gpu")
    assert {piece.preset for piece in papers.PIECES} <= set(paper_presets.PRESETS)
    assert [piece.priority for piece in papers.PIECES] == sorted(piece.priority for piece in papers.PIECES)
    first = papers.PIECES[0]
    assert {run.label for run in first.wanted()} == {"sma", "dp-sgd"}
    assert all(run.stage == "given" and run.budget.kind == "paper_sigma" for run in first.wanted())
    twice = papers.Piece("sma-table2", 1, "all of its own", papers._own)
    lines = papers.planned((first, twice), None, done={first.wanted()[0].without_curve.id})
    assert lines[2].startswith("| 1 | `sma-table2`: SMA-DP-SGD and DP-SGD on the paper's terms | 26 | 13 | 1 |")
    assert "| 78 | 13 | 0 |" in lines[3]  # 104 less the 26 before
    begun = papers.Piece("fo-fig2", 1, "beginnings", papers._paper, steps=500).wanted()
    assert {(run.steps, run.evaluations, run.lr) for run in begun} == {(500, 50, 0.8)}
    assert not {run.without_curve.id for run in begun} & {
        run.without_curve.id for run in papers.Piece("fo-fig2", 1, "", papers._paper).wanted()
    }


def papers_runs(papers, monkeypatch, tmp_path, workers):
    """Three short runs in the place of the papers', and what `run` is given."""
    run = Run(
        task="digits-mlp", label="dp-sgd", method="dp-sgd", options={}, budget=PrivacyTarget("noise_multiplier", 1.0),
        sample_rate=0.05, steps=2, delta=1e-5, stage="given", lr=0.1, factor=1.0, seed=0, holdout=0.0, evaluations=1,
        reproducible=False, physical_batch=None,
    )  # fmt: skip
    monkeypatch.setattr(papers.Piece, "wanted", lambda self: [replace(run, seed=seed) for seed in range(3)])
    monkeypatch.setattr(papers, "readable", lambda piece, task, data: True)
    monkeypatch.setattr(papers, "PIECES", papers.PIECES[:1])
    monkeypatch.setattr(papers, "Machine", lambda device, data: Machine(device, {}))
    return Namespace(
        data=tmp_path,
        out=tmp_path / "out",
        minutes=5.0,
        device="cpu",
        largest=2,
        only=None,
        times=0,
        workers=workers,
        have=None,
    )


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_papers_runs_go_on_where_they_were(bench, tmp_path, capsys, monkeypatch, workers):
    papers = bench("papers_gpu")
    given = papers_runs(papers, monkeypatch, tmp_path, workers)
    papers.run(given)
    rows = json.loads((given.out / "results.json").read_text())["rows"]
    assert sorted(row["seed"] for row in rows) == [0, 1, 2]
    assert all(row["best"] >= row["accuracy"] for row in rows)
    first = capsys.readouterr().out.splitlines()
    assert "3 runs in 2 stacks" in "\n".join(first)
    papers.run(given)
    said = capsys.readouterr().out.splitlines()
    assert said[2].startswith("| 1 |")
    assert "| 3 | 13 | 3 | 0 |" in said[2]
    assert "0 runs in 0 stacks" in said[3]
    kept = {"rows": [{"id": row["id"]} for row in rows[:2]]}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    papers.run(Namespace(**{**vars(given), "out": tmp_path / "other", "have": tmp_path / "kept.json"}))
    assert "1 runs in 1 stacks" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="--only nothing: choose from sma-table2"):
        papers.chosen(Namespace(only=["nothing"]))


def test_no_stack_of_the_papers_is_begun_that_would_not_end_in_time(bench, tmp_path, monkeypatch, capsys):
    papers = bench("papers_gpu")
    given = papers_runs(papers, monkeypatch, tmp_path, 1)
    monkeypatch.setattr(papers, "stack_seconds", lambda batch: 301.0)
    papers.run(given)
    assert "3 runs are left" in capsys.readouterr().out
    progress = papers.Progress([[1, 2], [3]], until=1e18)
    monkeypatch.setattr(papers, "stack_seconds", lambda batch: 1.0)
    monkeypatch.setattr(papers.Progress, "kind", staticmethod(lambda batch: "any"))
    progress.took([1], 3.0)
    progress.took([1], 1.0)
    assert progress.factors == {"any": 2.0}
    assert progress.next() == [1, 2]
    assert progress.next(stacks_only=True) is None


def test_the_spectra_of_a_stack_found_at_once_are_those_found_one_by_one(bench):
    papers = bench("papers_gpu")
    weights = [
        scale * torch.randn(rows, columns)
        for rows, columns, scale in ((64, 300, 0.05), (32, 64, 0.1), (64, 300, 0.1), (10, 32, 0.3), (12, 64, 0.1))
    ]
    weights.append(torch.full((64, 300), torch.nan))
    ours = papers.Batched(weights, "flatten").result()
    theirs = tail_exponent.exponents(weights)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert theirs[:5].isfinite().all()


def test_images_travel_without_loss(bench, tmp_path):
    data = bench("papers_data")
    random = np.random.default_rng(0)
    arrays = {
        "x_train": random.integers(0, 256, (203, 32, 32, 3), np.uint8),
        "x_test": random.integers(0, 256, (7, 32, 32, 3), np.uint8),
        "y_train": random.integers(0, 10, 203, np.uint8),
    }
    for name, more in (("colours", arrays), ("greys", {"x_train": arrays["x_train"][..., 0]})):
        np.savez(tmp_path / f"{name}.npz", **more)
        back = np.load(data.unpack(data.pack(tmp_path / f"{name}.npz", tmp_path), tmp_path))
        assert set(back) == set(more)
        assert all(np.array_equal(back[key], more[key]) for key in more)


def test_a_part_of_a_dataset_never_stands_for_the_whole(bench, tmp_path):
    papers = bench("papers_gpu")
    np.savez(tmp_path / "cifar10_7k.npz", y_train=np.zeros(5000), y_test=np.zeros(2000))
    piece = papers.Piece("br-fig7", 1, "", papers._given)
    assert papers.readable(papers.PIECES[0], "cifar10-mlp", tmp_path)
    assert not papers.readable(piece, "cifar10-hf", tmp_path)
    assert not papers.readable(papers.PIECES[0], "cifar100-mlp", tmp_path)


def test_verdicts_follow_from_intervals(bench):
    docs = bench("papers_docs")
    high, low, flat = (docs.Found(mean, mean - 1, mean + 1, 13, "here") for mean in (4.0, 1.5, 0.2))
    assert docs.verdict([high], 4.1) == docs.REPRODUCED
    assert docs.verdict([low], 4.1) == docs.PARTLY
    assert docs.verdict([flat], 4.1) == docs.verdict([flat, flat]) == docs.NOT
    assert docs.verdict([high, flat]) == docs.PARTLY
    assert docs.verdict([None]) == docs.verdict([]) == docs.NOT_RUN
    assert docs.verdict([flat, None, None]) == docs.TOO_LITTLE
    assert docs.verdict([high, None]) == docs.PARTLY
    assert docs.verdict([flat, None]) == docs.NOT
    up, open_, down = (docs.Found(mean, mean - 1, mean + 1, 2, "here", 0.5) for mean in (4.0, 0.2, -2.0))
    assert docs.verdict([up]) == docs.verdict([open_]) == docs.TOO_LITTLE  # two pairs never give less than p = 1/2
    assert docs.verdict([down]) == docs.verdict([open_], 4.1) == docs.NOT
    weak, strong = (docs.Found(4.0, 3.0, 5.0, 13, "here", p) for p in (0.04, 0.001))
    assert docs.verdict([weak]) == docs.verdict([strong, strong]) == docs.REPRODUCED
    assert docs.verdict([weak, weak]) == docs.NOT  # 0.04 twice is 0.08 after Holm
    row = {"task": "cifar10-mlp", "stage": "given", "budget": "the paper's sigma 1.1", "steps": 6250, "curve": []}
    rows = [
        {**row, "label": name, "seed": seed, "accuracy": base + seed / 1000, "epsilon": epsilon}
        for name, base, epsilon in (("a", 0.34, 67.2), ("b", 0.3, 21.1))
        for seed in range(13)
    ]
    found = docs.difference(rows, "a", "b")
    assert (round(found.mean, 6), found.seeds) == (4.0, 13)
    assert str(found) == "+4.0 (+4.0 to +4.0) at a true epsilon of 67.2 against 21.1"
    assert docs.difference(rows, "a", "c") is None
    curves = [{**each, "curve": [[25, each["accuracy"], 1.0, 2.0], [50, 0.9, 3.0, 2.0]]} for each in rows]
    assert round(docs.at_epsilon(curves, "a", "b", 2.0, "cifar10-mlp").mean, 6) == 2.0  # half way on both lines
    assert docs.at_epsilon(curves, "a", "b", 0.9, "cifar10-mlp") is None
    begun = [{**each, "steps": 500, "curve": [[10, 0.1, 0.9, 2.0], [20, 0.2, 1.1, 2.0]]} for each in rows[:13]]
    early = docs.at_epsilon([*begun, *curves], "a", "b", 1.0, "cifar10-mlp")  # a's is read where it was watched closely
    assert round(early.mean, 6) == round(15.0 - 30.6, 6)
    assert docs.at_epsilon([*curves, *begun], "a", "b", 4.0, "cifar10-mlp").mean == 0  # a beginning ended before
    assert docs.difference([*rows, *begun], "a", "b").mean == found.mean  # and has no final accuracy
    by_steps = docs.at_epsilon(curves, "a", "b", 2.0, "cifar10-mlp", {"a": 60.0, "b": 30.0})
    assert round(by_steps.mean, 6) == round(90 - 100 * (0.8 * 0.306 + 0.2 * 0.9), 6)
    facts = {"rounds": 2, "least": 1.0, "most": 3.0}
    rows_ = [{"label": label, "ratio": ratio, **facts} for label, ratio in (("dp-sgd", 1.0), ("sma 2-6", 2.9))]
    times = {"device": "here", "cores": 2, "load": 1.0, "rows": rows_}
    assert "with a load of 9 on 2 cores" in docs._spectral_runtime({**times, "load": 9.0}).found
    assert docs._spectral_runtime(times).verdict == docs.REPRODUCED
    assert docs._spectral_runtime(None).verdict == docs.NOT_AS_PRINTED
    assert docs.carried("fo-table3", "fo beta 0.90", "fo beta 1.00").seeds == 5
    assert docs.not_as_printed("x", "sma-table2", rows, [("a", "c", "cifar10-mlp")]).verdict == docs.NOT_AS_PRINTED


def trial_rows(preset, accuracies, **changes):
    """Rows of a preset's runs at the given rate, by label and seed."""
    found = paper_presets.find(preset).specification(None, seeds=13)
    runs = run_grid.due(found, run_grid.grid_of(found), {})
    facts = {"trials": 9, "updates": 3, "epsilon": 1.0, "curve": [], "stage": "given", **changes}
    return [
        {
            **{"id": r.without_curve.id, "task": r.task, "label": r.label, "options": dict(r.options), "seed": r.seed},
            **{"budget": str(r.budget), "steps": r.steps, "accuracy": accuracies[r.label] + r.seed / 1000, **facts},
        }
        for r in runs
        if r.label in accuracies and r.stage == "given" and r.task == "mnist-hf"
    ]


def test_runs_of_earlier_settings_are_no_evidence_for_a_preset(bench):
    docs = bench("papers_docs")
    pair = [("buffer 2", "buffer 1", "mnist-hf")]
    rows = trial_rows("br-fig4", {"buffer 1": 0.9, "buffer 2": 0.92})
    now = docs.of_trials(rows, "x", "br-fig4", pair)
    assert (now.verdict, now.seeds) == (docs.REPRODUCED, "13 (papers.json)")
    assert "+2.0" in now.found
    before = [{**row, "id": f"{row['id']}, before"} for row in rows]
    assert docs.of_trials(before, "x", "br-fig4", pair).verdict == docs.NOT_AS_PRINTED
    assert all("an earlier preset" in line for line in docs.trial_table(before)[5:])
    assert not any("an earlier preset" in line for line in docs.trial_table(rows)[5:])


def test_dpsgd_br_stands_beside_dpsgd_hf_with_its_printed_noise(bench):
    """Its run for 1,000 trials in br-table2-hf is not the one that counts where the printed one was made."""
    docs = bench("papers_docs")
    rows = trial_rows("br-table2-hf", {"dpsgd-br": 0.5, "dpsgd-hf": 0.9}) + trial_rows("br-table4", {"dpsgd-br": 0.95})
    found = docs.of_trials(rows, "x", "br-table2-hf", [("dpsgd-br", "dpsgd-hf", "mnist-hf")], "br-table4")
    assert "+5.0" in found.found
    (claim,) = [docs._printed_parameters(rows)]
    assert "mnist: 95.60 (printed 98.39), 3 updates in 9 trials" in claim.found
    assert claim.verdict == docs.TOO_LITTLE  # one dataset of four


def test_a_plateau_is_a_point_high_at_most(bench):
    """Figure 8: within a point of the best where the paper says it is flat."""
    docs = bench("papers_docs")
    values = {"T_max": (1, 3, 5, 7, 9), "p": (0.1, 0.3, 0.5, 0.7, 0.9), "k": (0, 0.5, 1, 2, 4)}
    specification = paper_presets.find("br-fig8").specification(None, seeds=1)
    ids = {
        run.label: run.without_curve.id
        for run in run_grid.due(specification, run_grid.grid_of(specification), {})
        if run.stage == "given"
    }
    rows = [
        {"id": ids[f"{name} {value:g}"], "label": f"{name} {value:g}", "stage": "given", "accuracy": 0.8}
        for name, each in values.items()
        for value in each
    ]
    assert docs._flat(rows).verdict == docs.REPRODUCED
    assert (
        docs._flat([{**row, "accuracy": 0.7} if row["label"] == "p 0.5" else row for row in rows]).verdict
        == docs.PARTLY
    )
    assert docs._flat(rows[:-1]).verdict == docs.NOT_AS_PRINTED


def test_a_claim_cites_only_methods_that_its_figure_has(bench):
    docs = bench("papers_docs")
    with pytest.raises(ValueError, match="fo-fig1 has no post-fm: its claim cannot cite it"):
        docs.above((), "Figure 1", "fo-fig1", [("fo beta 0.90", "post-fm", "cifar10-mlp")])
    line = docs.Claim("(beyond the paper) x", "y", "z", "13", docs.NOT).line()
    assert line.endswith("| - |")  # where no paper claims anything there is nothing to judge


@pytest.mark.slow
def test_the_page_of_verdicts_is_what_the_script_writes(bench, monkeypatch):
    docs = bench("papers_docs")
    monkeypatch.setattr("sys.argv", ["papers_docs.py", "--check"])
    docs.main()


def test_the_papers_rows_come_back_as_they_were(bench, tmp_path):
    kept = bench("papers_rows")
    setting = {"task": "cifar10-mlp", "label": "fo", "method": "fo-dp-sgd", "options": {"beta": 0.8}, "budget": "x"}
    setting |= {"stage": "given", "steps": 20, "lr": 0.8}
    curves = [[[10, 0.2 + seed, 1.5, 2.0], [20, 0.3, 2.5, 1.9 + seed]] for seed in range(3)]
    rows = [{**setting, "id": str(seed), "seed": seed, "epsilon": 2.5, "curve": curves[seed]} for seed in range(3)]
    rows[2]["curve"][1][2] = 2.25  # another epsilon on the way
    rows += [{**setting, "options": {}, "id": "3", "seed": 0, "accuracy": 0.5, "curve": []}]
    file = tmp_path / "papers.json"
    kept.write(file, rows, {"fo": 1.0}, [["a", 1]])
    found = kept.read(file)
    assert found == {"times": {"fo": 1.0}, "paths": [["a", 1]], "rows": rows}
    assert file.read_text().count("cifar10-mlp") == 2
    file.write_text(json.dumps(found))  # as results are
    assert kept.read(file) == found


def test_a_gain_that_the_memory_does_not_bring_is_reproduced_in_part(bench):
    docs = bench("papers_docs")

    def rows(**accuracies):
        labels = {"sma": "sma", "dp": "dp-sgd", "without": "sma beta 1.00", "whole": "sma, C per layer"}
        common = {"task": "cifar10-mlp", "stage": "given", "budget": "the paper's sigma 1.1", "steps": docs.LENGTH}
        return [
            {
                **common,
                "label": labels[name],
                "seed": seed,
                "accuracy": value + (seed + len(name)) % 3 / 1000,
                "epsilon": 1,
            }
            for name, value in accuracies.items()
            for seed in range(13)
        ]

    assert docs._spectral_gain(rows(sma=0.348, dp=0.34, without=0.34, whole=0.348)).verdict == docs.REPRODUCED
    for other in ({"without": 0.348, "whole": 0.348}, {"without": 0.34, "whole": 0.34}, {}):
        claim = docs._spectral_gain(rows(sma=0.348, dp=0.34, **other))
        assert claim.verdict == docs.PARTLY
        assert ("not run" in claim.found) == (not other)
    assert docs._spectral_gain(rows(sma=0.33, dp=0.34, without=0.33, whole=0.33)).verdict == docs.NOT


def test_a_memory_that_is_computed_without_weight_is_no_plain_dp_sgd(bench):
    docs = bench("papers_docs")

    def times(**ratios):
        labels = {"mine": "fo beta 0.90", "one": "fo beta 1.00", "plain": "dp-sgd"}
        rows = [{"label": labels[name], "ratio": value, "rounds": 8} for name, value in ratios.items()]
        return {"device": "a GPU", "load": 1.0, "cores": 16, "rows": rows}

    assert docs._runtime(times(mine=1.02, one=1.01, plain=1.0)).verdict == docs.REPRODUCED
    assert docs._runtime(times(mine=1.28, one=1.28, plain=1.0)).verdict == docs.PARTLY
    assert docs._runtime(times(mine=1.28, one=1.1, plain=1.0)).verdict == docs.NOT


def test_paths_are_judged_after_as_many_updates(bench):
    docs = bench("papers_docs")

    def path(quantity, difference):
        low, high = difference - 0.01, difference + 0.01
        row = {"label": "dpsgd-br", "quantity": quantity, "seeds": 13, "means": [1.0, 1.0 - difference], "p": 0.001}
        return row | {"difference": difference, "low": low, "high": high}

    longer = [path("winding", -0.8), path("loss", -0.5)]
    names = ("winding after as many updates", "loss after as many updates")
    assert docs._paths([*longer, *(path(name, 0.05) for name in names)]).verdict == docs.NOT
    assert docs._paths([*longer, *(path(name, -0.05) for name in names)]).verdict == docs.REPRODUCED
