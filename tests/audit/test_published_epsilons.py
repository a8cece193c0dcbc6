"""Do kept candidates tell what the computed laws say, and is the proved epsilon one that an attack reaches?"""

import json
from dataclasses import replace
from math import log

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as rdp_accountant
from scipy.stats import beta
from typer.testing import CliRunner

from vestige.accounting import rdp
from vestige.accounting.lower_bounds import selective_updates
from vestige.accounting.lower_bounds.selective_updates import Claimed, certify, laws
from vestige.audit.published_epsilons import STUDIES, claim, decayed_updates, readings, updates_for
from vestige.cli.main import app
from vestige.compare.paper_presets import published

LEAKY = Claimed(rate=0.2, sigma_t=2.0, validation_rate=0.4, sigma_v=1.3, threshold=-1.5, buffer=2)


def played(claimed, cut, present, count, rng):
    """The literal loop, trial by trial: the watched coordinate of each released candidate."""
    released = []
    while len(released) < count:
        held = []
        while len(held) < claimed.buffer:
            y = claimed.sigma_t * rng.normal() + (present and rng.random() < claimed.rate)
            raises = (y >= cut) != (present and rng.random() < claimed.validation_rate)
            noisy = (1 if raises else -1) + 2 * claimed.sigma_v * rng.normal()
            if noisy < claimed.threshold:
                held.append((noisy, y))
        gap = held[0][0] - held[-1][0]
        tied = abs(gap) <= claimed.tie
        first = rng.random() < 0.5 if tied else gap < 0
        released.append(held[0 if first or claimed.buffer == 1 else 1][1])
    return np.array(released)


@pytest.mark.parametrize("buffer", [1, 2])
@pytest.mark.parametrize("present", [True, False])
@pytest.mark.everyday("True-1", "False-1")
def test_the_law_of_a_released_candidate_is_that_of_the_loop(buffer, present):
    claimed, cut, rng, count = replace(LEAKY, buffer=buffer), -1.0, np.random.default_rng(3), 8000
    edges, *both = laws(claimed, cut)
    law = both[0 if present else 1]
    assert law.sum() == pytest.approx(1, abs=1e-9)
    seen = played(claimed, cut, present, count, rng)
    at = np.searchsorted(edges, [-3.0, -1.0, 0.0, 1.5, 3.0])
    wanted = np.array([part.sum() for part in np.split(law, at)])
    found = np.array([part.sum() for part in np.split(np.histogram(seen, edges)[0], at)])
    assert ((found - count * wanted) ** 2 / (count * wanted)).sum() < 25  # chi-square, 5 degrees of freedom


def test_an_attack_on_whole_runs_reaches_what_is_proved_and_not_more():
    """Four updates of a leaky setting: the likelihood ratio test on 200,000 runs, at 95% confidence."""
    claimed, cut, updates, delta, half = replace(LEAKY, rate=0.1, validation_rate=0.2), -1.0, 4, 1e-2, 100_000
    proved = selective_updates._proved(claimed, cut, updates, delta, selective_updates.COARSE)
    _, present, absent = laws(claimed, cut)
    there = (present > 0) & (absent > 0)
    loss = np.where(there, np.log(np.where(there, present, 1) / np.where(there, absent, 1)), 0.0)
    rng = np.random.default_rng(0)
    inside, outside = (
        loss[rng.choice(len(law), size=(half, updates), p=law / law.sum())].sum(1) for law in (present, absent)
    )
    found = 0.0
    for line in np.linspace(0.5, 1.5, 5) * proved:  # five lines, each at 99%
        hits, alarms = int((inside >= line).sum()), int((outside >= line).sum())
        power, false = beta.ppf(0.005, hits, half - hits + 1), beta.ppf(0.995, alarms + 1, half - alarms)
        found = max(found, log(max(power - delta, 1e-9) / false))
    assert 0.7 * proved < found < proved, (found, proved)


def test_without_rejection_the_bound_is_below_the_exact_price():
    """If every candidate is kept, what is proved is DP-SGD's own epsilon from below, and close to it."""
    from vestige.accounting import epsilon
    from vestige.priced_questions import SampledGaussian

    claimed = replace(LEAKY, rate=0.05)
    exact = epsilon({SampledGaussian(0.05, 2.0): 200}, 1e-5)
    assert 0.98 * exact < selective_updates._proved(claimed, None, 200, 1e-5, selective_updates.COARSE) <= exact


@pytest.mark.slow
def test_br_at_its_own_settings_on_mnist_is_refuted():
    (settings,) = [each for name, each in STUDIES["br-lower-bound"].settings(published()) if name == "mnist"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(selective_updates, "FINE", selective_updates.COARSE)
        found = certify(settings, updates_for(settings))
    claimed = claim(settings, found.updates)
    assert found.updates == 1246
    assert claimed == pytest.approx(1.0, abs=1e-3)
    assert claimed <= 1
    assert found.epsilon > 1.25 > claimed > found.without_rejection
    with pytest.raises(ValueError, match="buffer=3"):
        replace(settings, buffer=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("br-lower-bound", {"mnist": 1.37, "fmnist": 1.45, "cifar10": 1.31, "imdb": 1.22}),
        ("dpsur-lower-bound", {"mnist": 1.07, "fmnist": 1.14, "cifar10": 1.13, "imdb": 0.97}),
    ],
)
def test_the_command_says_what_is_refuted(name, least):
    result = CliRunner().invoke(app, ["reproduce", name, "--json"])
    rows = {(row["dataset"], row["target"]): row for row in json.loads(result.stdout)["rows"]}
    for dataset, bound in least.items():
        assert bound < rows[dataset, 1]["epsilon"] < bound + 0.05
        assert rows[dataset, 1]["refuted"] == (bound > 1)
    for (_, target), row in rows.items():
        assert target - 0.01 < row["claimed"] <= target
        assert row["refuted"] or name == "dpsur-lower-bound"
    assert len(rows) == (16 if name == "br-lower-bound" else 4)


def test_noise_as_equation_12_prints_it_is_refuted_at_another_bound_and_tosses_coins_at_table_4s():
    """Noise sigma_v on a change clipped to C_v: in units of C_v it is 2 sigma_v where C_v = 1/2, and 1,370 at 0.001."""
    claimed = replace(LEAKY, rate=0.05, validation_rate=0.1)
    literal = {bound: replace(claimed, sigma_v=claimed.sigma_v / (2 * bound)) for bound in (0.5, 0.001)}
    assert literal[0.5] == claimed
    priced = claim(claimed, 300)
    found = {
        bound: max(
            selective_updates._proved(each, cut, 300, 1e-5, selective_updates.COARSE) for cut in (-2.0, -1.0, None)
        )
        for bound, each in literal.items()
    }
    kept = selective_updates._proved(claimed, None, 300, 1e-5, selective_updates.COARSE)
    assert found[0.5] > priced > found[0.001]
    assert found[0.001] == pytest.approx(kept, rel=0.01)


def test_what_takes_no_data_refuses_them():
    result = CliRunner().invoke(app, ["reproduce", "br-lower-bound", "--data", "x", "--json"])
    assert result.exit_code == 2 or "--data" in result.output + str(result.exception)


@pytest.mark.parametrize(("decay", "fast"), [(0.99, True), (0.99, False)])
def test_updates_under_decay_are_those_of_another_accountant(decay, fast):
    """dp_accounting prices each update with the noise that it has by then."""
    (settings,) = [each for name, each in STUDIES["br-lower-bound"].settings(published()) if name == "mnist"]
    found = decayed_updates(settings, decay, fast)

    theirs, after = rdp_accountant.RdpAccountant([order for order in rdp.ORDERS if 7 < order < 14]), []
    for index in range(found + 1):
        sigma_v = settings.sigma_v * (decay**index if fast else 1)
        for rate, sigma in ((settings.rate, settings.sigma_t * decay**index), (settings.validation_rate, sigma_v)):
            theirs.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma)))
        if index + 1 >= found:
            after.append(theirs.get_epsilon_and_optimal_order(1e-5))
    (spent, order), (more, _) = after
    assert 7.5 < order < 13  # none of the other orders gives less
    assert spent <= 1.001
    assert more > 0.999
    assert decayed_updates(settings, 1.0, False) == updates_for(settings)


@pytest.mark.slow
def test_no_decay_and_batch_agree_with_both_counts_as_updates_and_some_as_trials():
    found = {}
    for row in readings(published()):
        found.setdefault((row["validation_batch"], row["decay"], row["fast"]), {})[row["dataset"]] = row["agrees"]
    both = {key: {each["mnist"], each["fmnist"]} for key, each in found.items()}
    assert not [key for key, words in both.items() if words == {"updates"}]
    assert {key for key, words in both.items() if words == {"trials"}} >= {(128, 0.999, True), (256, 0.999, True)}
    assert all(each["imdb"] is None for each in found.values())
