"""Are a preset's figures drawn on its paper's own axes, from the runs on its own terms?"""

import re

import pytest

from vestige import accounting
from vestige.compare import paper_figures, paper_presets
from vestige.compare.report import drawing
from vestige.priced_questions import SampledGaussian

SIGMA = {"kind": "paper_sigma", "value": 1.1}


def record(label, *, curve=(), seed=0, budget=SIGMA, stage="given", task="cifar10-mlp", **more):
    run = {"task": task, "label": label, "stage": stage, "seed": seed, "budget": budget}
    return {"status": "done", "run": {**run, "sample_rate": 0.04, "delta": 1e-5}, "curve": list(curve), **more}


def drawn_from(preset, records):
    """The figures of a preset from these records."""
    found = paper_presets.find(preset)
    specification = {
        "contenders": [{"label": each.label} for each in found.full.contenders],
        "budgets": [{"kind": each.kind, "value": each.value} for each in found.full.budgets],
        "baseline": found.full.baseline,
        "problems": [{"task": each.task} for each in found.full.problems],
    }
    return list(paper_figures.paper_figures(found.figures, {"records": records, "specification": specification}))


def points(series):
    return [(x, pytest.approx(y)) for x, y, _, _ in series.points]


def test_every_figure_of_the_papers_says_what_it_draws():
    for name, preset in paper_presets.PRESETS.items():
        assert bool(preset.figures) == (re.search(r"-fig\d$", name) is not None or name == "fo-alpha"), name
        for drawn in preset.figures:
            quantities = [drawn["y"]] if isinstance(drawn["y"], str) else drawn["y"]
            assert set(quantities) <= {*paper_figures.AXES, "components"}
            assert drawn["x"] in {"epoch", "epsilon", "marginal epsilon", "setting", "budget"}


def test_figure_3_is_over_epochs_of_the_papers_own_budget():
    curve = [(25, 0.2, 1.0, 2.0), (50, 0.4, 2.0, 1.0)]
    higher = [(25, 0.4, 1.0, 2.0), (50, 0.6, 2.0, 1.0)]
    records = [record("fo beta 0.90", curve=curve), record("fo beta 0.90", curve=higher, seed=1)]
    records += [record("fo beta 0.90", curve=higher, budget={"kind": "epsilon", "value": 17.4})]
    records += [record("fo beta 1.00", curve=curve, stage="tuning")]
    left, right = drawn_from("fo-fig3", records)
    assert (left.x, left.y, left.percent, right.y) == ("epoch", "test accuracy", True, "epsilon spent so far")
    ((one,), (other,)) = left.series, right.series
    assert points(one) == [(1.0, 0.3), (2.0, 0.5)]
    assert points(other) == [(1.0, 1.0), (2.0, 2.0)]
    (both,) = drawn_from("fo-fig2", records[:2])
    assert points(both.series[0]) == [(1.0, 0.3), (2.0, 0.5)]  # here over epsilon
    assert both.x == "epsilon spent so far"


def test_the_marginal_axis_is_sigma_over_beta_and_no_guarantee():
    """Three layers at sigma 1.1 and beta 0.9: accounted jointly, drawn one by one."""
    noise = 1.1 / 0.9 / 3**0.5
    made = record("sma beta 0.90", curve=[(25, 0.2, 9.0, 2.0)], noise_multiplier=noise, groups=3)
    wanted = accounting.epsilon({SampledGaussian(0.04, 1.1 / 0.9): 25}, 1e-5, "rdp")
    (figure,) = drawn_from("sma-fig3", [made])
    assert points(figure.series[0]) == [(pytest.approx(wanted), 0.2)]
    assert "no guarantee" in figure.x
    (figure,) = drawn_from("sma-fig5", [made])
    assert points(figure.series[0]) == [(1.0, wanted)]
    assert "no guarantee" in figure.y


def test_settings_stand_side_by_side_with_their_intervals():
    curve = [(25, 0.5, 1.0, 2.0), (50, 0.3, 2.0, 1.0)]
    records = [
        record(label, curve=curve, accuracy=0.3 + seed / 100, seed=seed)
        for label in ("dp-sgd", "fo beta 0.90")
        for seed in (0, 1)
    ]
    (figure,) = drawn_from("fo-fig8", records)
    assert figure.categories == ("dp-sgd", "uniform-memory", "exponential-memory", "fo beta 0.90")
    final, best = figure.series
    assert (final.name, best.name) == ("test accuracy", "best test accuracy on the way")
    assert points(final) == [(0.0, 0.305), (3.0, 0.305)]
    assert points(best) == [(0.0, 0.5), (3.0, 0.5)]
    assert final.points[0][2] < 0.305 < final.points[0][3]
    assert drawing.svg(figure, ["dp-sgd"], standalone=True).startswith("<svg")


def test_counts_have_a_figure_and_parameters_a_panel_each():
    one = {"kind": "epsilon", "value": 1.0}
    records = [
        record(f"buffer {n}", budget=one, task="mnist-hf", accuracy=0.9, trials=100 * n, updates=50) for n in (1, 2)
    ]
    accuracy, trials, updates = drawn_from("br-fig4", records)
    assert (accuracy.percent, trials.percent, updates.percent) == (True, False, False)
    assert points(trials.series[0]) == [(0.0, 100.0), (1.0, 200.0)]
    labels = ("T_max 3", "p 0.5", "k 2")
    records = [record(label, budget=one, task="fmnist-hf", accuracy=0.8) for label in labels]
    drawn = drawn_from("br-fig8", records)
    assert [(figure.x, len(figure.categories)) for figure in drawn] == [("T_max", 5), ("p", 5), ("k", 5)]
    assert drawn[1].categories[2] == "0.5"
    assert points(drawn[1].series[0]) == [(2.0, 0.8)]
    records = [record("fo beta 0.90, C 0.5", curve=[(25, 0.2, 1.0, 2.0)], budget={**SIGMA, "value": 1.5})]
    (clips,) = drawn_from("fo-fig7", records)
    assert clips.title.startswith("cifar10-mlp, C 0.5 at the paper's sigma 1.5")
    assert clips.series[0].name == "fo beta 0.90"


def test_accuracy_over_epsilon_is_of_runs_that_end_there_where_noise_follows_answers():
    records = [
        record("dpsgd-br", budget={"kind": "epsilon", "value": value}, task="imdb-lstm", accuracy=value / 10)
        for value in (2.0, 1.0)
    ]
    (figure,) = drawn_from("br-fig6", records)
    assert figure.x == "epsilon"
    assert points(figure.series[0]) == [(1.0, 0.1), (2.0, 0.2)]


def test_components_are_over_epochs_too():
    pictures = {"exponent": [[25, [3.0] * 21]], "tempering": [[25, [0.0] * 21]]}
    made = record("sma", task="cifar10-resnet18", pictures=pictures)
    drawn = drawn_from("sma-fig4", [made])
    assert [(figure.x, figure.series[0].points[0][0]) for figure in drawn] == [("epoch", 1.0)] * 2
    assert all(figure.key.startswith("paper-") for figure in drawn)
    assert not drawn_from("sma-fig3", [made])
