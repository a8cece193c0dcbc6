"""Is every example put into one step of an epoch, uniformly, and are crowded samples thinned uniformly?"""

import numpy as np
import pytest
from scipy import stats

from vestige.priced_questions import AllocatedGaussian, Gaussian, SampledGaussian, TruncatedGaussian
from vestige.randomness.keys import Randomness
from vestige.randomness.sampling import Allocation, Poisson, Shuffled, Truncated, joined, sampling_by_name

POPULATION, PERIOD, EPOCHS = 300, 10, 60


def epochs(sampling, period=PERIOD):
    key = Randomness.secret()
    draws = [sampling.draw(POPULATION, step, key).numpy() for step in range(period * EPOCHS)]
    return [draws[start : start + period] for start in range(0, len(draws), period)]


def fair(successes, trials, chance) -> bool:
    return stats.binomtest(int(successes), int(trials), chance).pvalue > 1e-6


def looks_allocated(drawn, period=PERIOD) -> bool:
    """Everyone once an epoch; sizes of steps multinomial; steps of two examples, and of two epochs, independent."""
    if any(sorted(np.concatenate(epoch)) != list(range(POPULATION)) for epoch in drawn):
        return False
    sizes = np.array([[len(step) for step in epoch] for epoch in drawn])
    spread = ((sizes - POPULATION / period) ** 2).sum() / (POPULATION / period)
    place = np.zeros((len(drawn), POPULATION), dtype=int)
    for row, epoch in zip(place, drawn, strict=True):
        for step, members in enumerate(epoch):
            row[members] = step
    neighbours, again = place[:, 1:] == place[:, :-1], place[1:] == place[:-1]
    uniform = stats.chisquare(np.bincount(place.ravel(), minlength=period)).pvalue
    return (
        1e-6 < stats.chi2(len(drawn) * (period - 1)).cdf(spread) < 1 - 1e-6
        and uniform > 1e-6
        and fair(neighbours.sum(), neighbours.size, 1 / period)
        and fair(again.sum(), again.size, 1 / period)
    )


def test_allocations_look_allocated_and_nothing_else_does():
    assert looks_allocated(epochs(Allocation(PERIOD)))
    assert not looks_allocated(epochs(Shuffled(1 / PERIOD))), "batches of one size are another law"
    assert not looks_allocated(epochs(Poisson(1 / PERIOD)))
    once = epochs(Allocation(PERIOD))[0]
    assert not looks_allocated([once] * EPOCHS), "the same allocation in every epoch is another law"
    ordered = [[np.sort(step) for step in np.array_split(np.arange(POPULATION), PERIOD)]] * EPOCHS
    assert not looks_allocated(ordered)


def test_an_epoch_is_one_question_and_other_questions_stay_as_they_are():
    assert Allocation(7).question(SampledGaussian(1 / 7, 1.5)) == AllocatedGaussian(7, 1.5)
    truncated = Truncated(0.1, 20, POPULATION)
    assert truncated.question(SampledGaussian(0.1, 1.5)) == TruncatedGaussian(0.1, 1.5, 20, POPULATION)
    for sampling in (Allocation(7), truncated, Poisson(0.1)):
        assert sampling.question(Gaussian(3.0)) == Gaussian(3.0)


def test_two_keys_allocate_differently_and_one_key_alike():
    key, other = Randomness.secret(), Randomness.secret()
    first = [Allocation(5).draw(50, step, key).tolist() for step in range(5)]
    assert first == [Allocation(5).draw(50, step, key).tolist() for step in range(5)]
    assert first != [Allocation(5).draw(50, step, other).tolist() for step in range(5)]


def test_a_truncated_sample_is_poisson_up_to_its_bound_and_drops_uniformly():
    rate, most, key = 0.1, 32, Randomness.secret()
    kept = np.zeros(POPULATION)
    crowded = 0
    for step in range(1500):
        found = Truncated(rate, most, POPULATION).draw(POPULATION, step, key).numpy()
        before = joined(POPULATION, rate, key.stream("sample", step))
        assert len(found) == min(most, len(before))
        assert set(found) <= set(before)
        if len(before) > most:
            crowded += 1
            kept[before] += np.isin(before, found) - most / len(before)  # mean zero if every one is as likely
    assert crowded > 250
    variance = crowded * rate * 0.2
    assert stats.chi2(POPULATION).sf((kept**2).sum() / variance) > 1e-6


def test_dropping_the_last_ones_is_not_uniform():
    """What the test above can tell: keeping the first of a crowded sample favours small numbers."""
    rate, most, key = 0.1, 32, Randomness.secret()
    kept = np.zeros(POPULATION)
    for step in range(1000):
        before = joined(POPULATION, rate, key.stream("sample", step))
        if len(before) > most:
            kept[before] += (np.arange(len(before)) < most) - most / len(before)
    assert stats.chi2(POPULATION).sf((kept**2).sum() / (1000 * 0.3 * rate * 0.2)) < 1e-6


def test_names_and_what_is_wrong_with_them():
    assert sampling_by_name("allocation", 512 / 50_000, 50_000) == Allocation(98)
    assert sampling_by_name("truncated", 0.1, 100, 20) == Truncated(0.1, 20, 100)
    for name, most, said in (
        ("weighted", None, "unknown"),
        ("poisson", 5, "max_batch=5"),
        ("truncated", None, "needs it"),
    ):
        with pytest.raises(ValueError, match=said):
            sampling_by_name(name, 0.1, 100, most)
