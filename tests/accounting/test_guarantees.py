"""Is there an epsilon only where there is a theorem, and does it carry its assumptions?"""

from math import exp

import pytest

from histories import DELTA, steps
from vestige.accounting import Facts, epsilon, guarantee
from vestige.assumptions import ASSUMPTIONS


def test_a_guarantee_carries_its_assumptions():
    said = guarantee(steps(2.0, 100), DELTA, Facts())
    assert said.epsilon == epsilon(steps(2.0, 100), DELTA)
    assert said.epsilon_rdp == epsilon(steps(2.0, 100), DELTA, "rdp")
    assert said.accountant == "pld"
    assert said.adjacency == "zero-out one row"
    assert said.reasons == ()
    assert [each.name for each in said.assumptions] == list(ASSUMPTIONS)
    assert said.assumption("key").status == "assumed"
    assert guarantee({}, DELTA, Facts()).epsilon == 0


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (Facts(sampling="shuffled"), "shuffled"),
        (Facts(sampling="cyclic-poisson"), "SampledGaussian"),
        (Facts(sampling="every-example"), "SampledGaussian"),
        (Facts(examples_independent=False), "clipping"),
        (Facts(schedule="data-dependent"), "filter"),
        (Facts(schedule="filtered"), "filter"),
        (Facts(schedule="annealed"), "annealed"),
        (Facts(nonprivate_outputs=True), "without noise"),
        (Facts(noise="seeded"), "seed"),
        (Facts(noise="borrowed"), "borrowed"),
    ],
)
def test_without_a_theorem_there_is_no_epsilon(facts, word):
    said = guarantee(steps(2.0, 100), DELTA, facts)
    assert said.epsilon is None
    assert len(said.reasons) == 1
    assert word in said.reasons[0]


def test_seeded_noise_is_priced_as_if_it_were_secret():
    said = guarantee(steps(2.0, 100), DELTA, Facts(noise="seeded"))
    assert said.epsilon is None
    assert said.epsilon_if_noise_were_secret == epsilon(steps(2.0, 100), DELTA)
    shuffled = guarantee(steps(2.0, 100), DELTA, Facts(noise="seeded", sampling="shuffled"))
    assert shuffled.epsilon_if_noise_were_secret is None
    assert len(shuffled.reasons) == 2


def test_no_noise_no_epsilon():
    said = guarantee(steps(0.0, 1), DELTA, Facts())
    assert said.epsilon is None
    assert "without noise" in said.reasons[0]


def test_a_filtered_run_is_promised_the_filters_epsilon():
    said = guarantee(steps(2.0, 100), DELTA, Facts(schedule="filtered", filter_epsilon=5.0))
    assert (said.epsilon, said.accountant) == (5.0, "renyi filter")
    cheat = guarantee(steps(0.5, 1000), DELTA, Facts(schedule="filtered", filter_epsilon=5.0))
    assert cheat.epsilon is None
    assert "filter" in cheat.reasons[0]
    assert cheat.epsilon_rdp > 5
    assert cheat.epsilon_if_noise_were_secret is None


def test_noise_in_floating_point_rests_on_one_more_assumption():
    lattice, floating = (guarantee(steps(2.0, 100), DELTA, Facts(arithmetic=each)) for each in ("lattice", "float32"))
    assert (lattice.assumption("noise").status, floating.assumption("noise").status) == ("checked", "assumed")
    assert lattice.epsilon == floating.epsilon
    with pytest.raises(ValueError, match="arithmetic='decimal'"):
        guarantee(steps(2.0, 100), DELTA, Facts(arithmetic="decimal"))


def test_delta_pays_for_the_distance_of_the_noise_from_the_ideal():
    """(1 + e^epsilon) times the distance, over all numbers of all answers, is taken from delta."""
    few, many = (guarantee(steps(2.0, 100), DELTA, Facts(coordinates=each)) for each in (10**9, 10**17))
    assert few.epsilon == pytest.approx(guarantee(steps(2.0, 100), DELTA, Facts()).epsilon, rel=1e-9)
    numbers = 2 * 100 * 10**17
    spared = DELTA - (1 + exp(many.epsilon_rdp)) * 2.0**-96 * numbers
    assert 0.999 * DELTA < spared < DELTA * (1 - 1e-9)
    assert many.epsilon == epsilon(steps(2.0, 100), spared)
    assert many.epsilon > few.epsilon
    assert many.assumptions == few.assumptions


def test_where_delta_cannot_pay_it_is_said():
    wild = guarantee(steps(0.01, 1000), DELTA, Facts(coordinates=10**6))
    assert wild.assumption("noise").status == "assumed"
    assert "neglected" in wild.assumption("noise").detail
