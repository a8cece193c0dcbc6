"""Is what is drawn a Gaussian rounded to whole steps, as closely as is said, and is a wrong table seen?"""

from dataclasses import replace

import mpmath
import numpy as np
import pytest
from scipy import stats

from vestige.randomness import rounded_gaussian as law
from vestige.randomness.keys import Randomness

STREAM = Randomness.reproducible(1).stream


def exact_mass(bin):
    """How likely a magnitude lies in a bin, from the error function in 300 bits."""
    with mpmath.workprec(300):
        scale = mpmath.mpf(2) ** -law.STEPS / mpmath.sqrt(2)
        edges = [(mpmath.mpf(each << law.WIDTH) - 0.5) * scale for each in (bin, bin + 1)]
        return (mpmath.erfc(edges[0]) if bin else 1) - mpmath.erfc(edges[1])


@pytest.mark.parametrize("bin", [0, 1, 2, 77, 511, 1024, 2047, 3000, 4095])
@pytest.mark.everyday("0", "1")
def test_the_masses_of_bins_are_those_of_the_error_function(bin):
    with mpmath.workprec(300):
        off = abs(mpmath.mpf(law.masses()[bin]) / 2**law.PRECISION - exact_mass(bin))
        assert off < mpmath.mpf(2) ** -200


def test_the_table_is_as_close_to_the_law_as_is_said():
    table = law.table()
    assert sum(table.weights()) == 2 ** (law.BINS + law.SHARE)
    assert law.distance(table) <= law.DISTANCE


@pytest.mark.parametrize("part", ["threshold", "rest", "alias"])
def test_a_broken_table_is_seen(part):
    table = law.table()
    broken = getattr(table, part).copy()
    column = int(np.argmax(table.alias != np.arange(len(table.alias))))
    broken[column] ^= {"threshold": 1, "rest": 1 << 63, "alias": 1}[part]
    assert law.distance(replace(table, **{part: broken})) > law.DISTANCE


def test_the_assumed_distance_is_the_one_that_is_charged():
    from vestige.accounting import guarantees

    assert guarantees.DISTANCE == law.DISTANCE


# --- what is drawn ---------------------------------------------------------------------------------------------------


@pytest.fixture
def coarse(monkeypatch):
    """The same sampler with a standard deviation of 64 steps, where every number can be counted."""
    sizes = {"STEPS": 6, "BINS": 7, "WIDTH": 3, "COLUMN": 57, "SHARE": 57 + 64, "TOSS": 60}
    for name, value in sizes.items():
        monkeypatch.setattr(law, name, value)
    monkeypatch.setattr(law, "SLOPE", (1 - 2.0**-12 / 12) * 2.0**-13)
    monkeypatch.setattr(law, "MARGIN", 2.0**12)
    law.table.cache_clear()
    yield
    law.table.cache_clear()


def fits(drawn, deviation=64.0):
    """A chi-squared test of every number within four standard deviations."""
    edges = np.arange(-256, 258) - 0.5
    counts = np.bincount(drawn[np.abs(drawn) <= 256] + 256, minlength=513)
    chances = np.diff(stats.norm.cdf(edges / deviation))
    inside = counts.sum()
    return stats.chisquare(counts, inside * chances / chances.sum()).pvalue


def test_every_number_is_as_likely_as_the_gaussian_rounds_to_it(coarse):
    drawn = law.draw(1_000_000, STREAM("coarse", 0))
    assert fits(drawn) > 1e-6
    assert fits(drawn, 64 * 1.01) < 1e-6
    assert fits(np.where(drawn == 0, 1, drawn)) < 1e-6


def test_where_nothing_is_clear_bits_decide_the_same_law(coarse, monkeypatch):
    monkeypatch.setattr(law, "MARGIN", 2.0**70)
    assert fits(law.draw(20_000, STREAM("coarse", 1))) > 1e-6


def test_the_last_bits_are_uniform_and_the_first_are_gaussian():
    drawn = law.draw(1_000_000, STREAM("fine", 0))
    for bits in (drawn & 255, (drawn >> 8) & 255, (drawn >> 16) & 255):
        assert stats.chisquare(np.bincount(bits, minlength=256)).pvalue > 1e-6
    unit = drawn * 2.0**-law.STEPS
    edges = np.linspace(-4, 4, 400)
    counts, _ = np.histogram(unit, edges)
    chances = np.diff(stats.norm.cdf(edges))
    assert stats.chisquare(counts, counts.sum() * chances / chances.sum()).pvalue > 1e-6
    assert abs(np.corrcoef(unit[1:], unit[:-1])[0, 1]) < 6e-3
    assert abs(np.corrcoef(unit[1:] ** 2, unit[:-1] ** 2)[0, 1]) < 6e-3


class Script:
    """A stream whose words are given."""

    def __init__(self, *words):
        self.left = list(words)

    def words(self, count):
        taken, self.left = self.left[:count], self.left[count:]
        return np.array(taken, dtype=np.uint64)


def test_a_word_at_its_threshold_is_decided_by_the_next():
    table = law.table()
    column = int(np.argmax((table.alias != np.arange(len(table.alias))) & (table.rest > 0)))
    word = (column << law.COLUMN) + int(table.threshold[column])
    below, at = int(table.rest[column]) - 1, int(table.rest[column])
    assert law._bins(np.array([word], dtype=np.uint64), Script(below)) == [column]
    assert law._bins(np.array([word], dtype=np.uint64), Script(at)) == [table.alias[column]]
    assert law._bins(np.array([word - 1], dtype=np.uint64), Script()) == [column]
    assert law._bins(np.array([word + 1], dtype=np.uint64), Script()) == [table.alias[column]]


@pytest.mark.parametrize("gain", [1, 2**40 + 12345, 2**56 + 987654321])
def test_a_toss_at_its_chance_is_decided_by_more_bits(gain):
    with mpmath.workprec(400):
        scale = mpmath.mpf(2) ** (-2 * law.STEPS)
        chance = mpmath.exp(-gain * scale / 2 * (1 - scale / 12))
        bits = int(mpmath.floor(chance * 2 ** (law.TOSS + 128)))
    toss, more, last = bits >> 128, (bits >> 64) % 2**64, bits % 2**64

    def kept(*words):
        return bool(law._tossed(np.array([toss]), np.array([gain]), Script(*words))[0])

    assert kept(more - 1)
    assert not kept(more + 1)
    assert kept(more, last - 1)
    assert not kept(more, last + 1)
    assert bool(law._tossed(np.array([toss - 2]), np.array([gain]), Script())[0])
    if toss + 2 < 2**law.TOSS:
        assert not law._tossed(np.array([toss + 2]), np.array([gain]), Script())[0]


def test_there_is_one_zero():
    words = np.array([0, 1 << law.WIDTH], dtype=np.uint64)  # place 0 in bin 0, with either sign
    found, kept = law._places(np.array([0, 0]), words, Script())
    assert found.tolist() == [0, 0]
    assert kept.tolist() == [True, False]
