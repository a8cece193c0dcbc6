"""Is a plan what its budget buys, and nothing that it does not?"""

from dataclasses import replace

import pytest

from commands import as_json
from commands import vestige as command
from vestige import accounting
from vestige.compare.report import plans_page as report
from vestige.priced_questions import Gaussian, SampledGaussian
from vestige.recipes.catalogue import find
from vestige.recipes.planner import LEAST_STEPS, Budget, plan, seconds_of
from vestige.recipes.throughput import views_per_second

HOUR = Budget(examples=50_000, epsilon=3.0, delta=1e-5, seconds=3600.0, views_per_second=27_000.0)


def test_a_plan_keeps_to_both_budgets():
    found = plan(HOUR)
    best = found.best
    price = accounting.epsilon({SampledGaussian(best.sample_rate, best.noise_multiplier): best.steps}, 1e-5)
    assert found.epsilon == price <= 3.0
    assert price > 2.99  # nothing of it is left unused
    for each in (best, *found.by_batch):
        views = each.steps * each.batch * found.recipe.augment
        assert each.seconds == pytest.approx(views / 27_000)
        assert each.seconds <= 3600 * 1.001
        assert each.steps >= LEAST_STEPS["images"]
        assert each.signal == pytest.approx(each.batch * each.steps**0.5 / each.noise_multiplier)
    most = max(each.signal for each in found.by_batch)
    here = next(each for each in found.by_batch if each.batch == best.batch)
    assert here.signal >= 0.97 * most


def test_a_plan_pays_for_what_its_recipe_asks_before_the_first_step():
    found = plan(HOUR, "cifar10-scattering-linear")
    steps = {SampledGaussian(found.best.sample_rate, found.best.noise_multiplier): found.best.steps}
    assert found.epsilon == accounting.epsilon({**steps, Gaussian(8.0): 2}, 1e-5) <= 3.0
    assert found.epsilon > 2.99
    assert accounting.epsilon(steps, 1e-5) < found.epsilon - 0.002


@pytest.mark.parametrize(("recipe", "file"), [("cifar10-wrn16-4-prior-short", "--prior FILE"), ("cifar10-wrn16-4", "")])
@pytest.mark.everyday("cifar10-wrn16-4-")
def test_the_command_names_the_file_that_the_recipe_needs(recipe, file):
    words = as_json(
        "plan", "--examples", 50_000, "--epsilon", 1, "--time", "1h", "--recipe", recipe, "--views-per-second", 1e5
    )
    assert words["command"].endswith(f"--data ... {file}".rstrip())


def test_more_time_buys_more_signal_and_little_time_a_shorter_recipe():
    found = plan(HOUR)
    quarter, fourfold = (max(each.signal for each in choices) for _, choices in found.other_times)
    here = max(each.signal for each in found.by_batch)
    assert quarter <= here <= fourfold
    assert found.recipe.name == "images-scratch"
    assert plan(replace(HOUR, seconds=300.0)).recipe.name == "images-scratch-short"
    assert plan(replace(HOUR, seconds=300.0), "images-scratch").recipe.name == "images-scratch"
    with pytest.raises(ValueError, match="too short for images-scratch-short"):
        plan(replace(HOUR, seconds=0.5))


def test_where_the_recipe_itself_fits_its_rate_stays():
    """The noise walks as far as in the recipe: at its own batch and steps that is its own rate."""
    found = plan(HOUR)
    own, best = found.own, found.best
    walk = [each.noise_multiplier / each.batch * each.steps**0.5 for each in (own, best)]
    assert found.lr * walk[1] == pytest.approx(find(found.recipe.name).settings(3.0)["lr"] * walk[0])
    assert plan(replace(HOUR, examples=5_000), kind="tabular").lr == "auto"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"examples": 0}, "examples=0"),
        ({"epsilon": -1.0}, "epsilon=-1"),
        ({"seconds": 0.0}, "seconds=0"),
        ({"views_per_second": 0.0}, "views_per_second=0"),
        ({"delta": 0.5}, "delta=0.5"),
    ],
)
def test_budgets_that_cannot_be_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        replace(HOUR, **changes)


def test_times_are_read_as_people_write_them():
    for text in ("", "h", "-1h", "soon"):
        with pytest.raises(ValueError, match="time="):
            seconds_of(text)


def test_throughput_is_measured_on_made_up_examples():
    assert views_per_second("mlp", (10,), augment=None) > 10


def test_a_plan_is_printed_and_is_a_page_without_a_network(tmp_path):
    flags = ("plan", "--examples", "20000", "--epsilon", "1", "--time", "5m", "--views-per-second", "27000")
    found = as_json(*flags, "--out", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<svg") >= 3
    for words in (found["command"].replace("'", "&#x27;"), "What a plan does not know", "5 min"):
        assert words in page
    assert page == report.page(found)
    code, out, _ = command(*flags)
    assert code == 0
    assert found["command"] in out
    timed = as_json("plan", "--examples", "2000", "--epsilon", "3", "--time", "1h", "--kind", "tabular", "--shape", "4")
    assert timed["recipe"] == "tabular"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--time", "soon"), "--time='soon'"),
        (("--kind", "sounds"), "--kind='sounds'"),
        (("--recipe", "tabular", "--kind", "images"), "--kind cannot be given too"),
        (("--views-per-second", "5", "--model", "mlp"), "--model cannot be given too"),
        (("--recipe", "text-words"), "--views-per-second is missing"),
        (("--shape", "3,a"), "--shape='3,a'"),
        (("--shape", "3,0,1"), "--shape='3,0,1'"),
        (("--model", "wrn99"), "no such network"),
        (
            ("--recipe", "features-least-squares", "--views-per-second", "5"),
            "--recipe='features-least-squares' asks once",
        ),
    ],
)
def test_mistakes_name_their_flag(flags, words):
    given = () if "--time" in flags else ("--time", "1h")
    code, _, error = command("plan", "--examples", "1000", "--epsilon", "1", "--delta", "1e-4", *given, *flags)
    assert code == 2
    assert words in error, error
