"""How often is a method told from its equal? Simulated comparisons of equal methods, judged as `vestige compare` does.

usage: python bench/false_findings.py [--families N] [--seeds 2 5 9 20] [--methods M] [--budgets B]

Accuracy is a curve over the learning rate, the same for every method. A trial sees it with noise, the best trial gives
the rate, and the final run has noise of its own; accuracies are whole numbers of test examples. All rows of a family,
tuned and at the automatic rate, are tested together, so a false finding is any row that is told apart. The last column
is the way of version 0.2: one choice of each rate for all seeds, paired t-tests, Holm over each kind of rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np
from scipy.special import stdtr
from scipy.stats import beta

from vestige.compare.aggregate_results import RowKey, judge
from vestige.compare.statistics import ALPHA, holm

FACTORS = np.log2([0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0])
AUTOMATIC = 3
"""The place of the automatic rate among them."""
Generator = np.random.Generator
Array = np.ndarray

NOISES: dict[str, Callable[[Generator, tuple[int, ...]], Array]] = {
    "normal": lambda generator, size: generator.normal(size=size),
    "heavy tails": lambda generator, size: generator.standard_t(3, size=size) / sqrt(3),
    "uniform": lambda generator, size: generator.uniform(-sqrt(3), sqrt(3), size=size),
    "two values": lambda generator, size: generator.choice([-1.0, 1.0], size=size) + 0.02 * generator.normal(size=size),
    "skewed": lambda generator, size: 1 - generator.exponential(size=size),
    "rare collapse": lambda generator, size: 0.3 * generator.normal(size=size) - 4.0 * (generator.random(size) < 0.1),
}
"""All but the last of mean 0 and standard deviation 1."""


@dataclass(frozen=True)
class World:
    """Where equal methods are compared: their curve over the rate, and the noise of their runs."""

    name: str
    noise: str
    curvature: float = 0.01
    """Accuracy lost a factor of two from the best rate; a factor of four costs four times as much."""
    best: float = 0.4
    """The best rate, as the logarithm to base 2 of its multiple of the automatic one."""
    cliff: float = 0.0
    """What a rate of four times the automatic one or more loses besides."""
    tuning_noise: float = 0.02
    final_noise: float = 0.012
    ratio: float = 1.0
    """How much larger the final noise of every second method is."""
    examples: int = 360


WORLDS = [
    *(World(f"{noise} noise", noise) for noise in NOISES),
    World("flat curve", "normal", curvature=0.001, tuning_noise=0.05),
    World("a cliff near the best rate", "normal", best=1.6, cliff=0.3, tuning_noise=0.06),
    World("a cliff, two values", "two values", best=1.6, cliff=0.3, tuning_noise=0.06),
    World("few test examples", "normal", final_noise=0.003, tuning_noise=0.001, examples=100),
    *(World(f"{noise} noise, three times for some", noise, ratio=3.0) for noise in list(NOISES)[:4]),
]
"""Exchanging two methods of a seed changes no probability in any of these."""
UNEQUAL = World("skewed noise, three times for some", "skewed", ratio=3.0)
"""Equal in the mean and not in distribution: their difference is skewed, and no test is exact."""


def accuracies(
    world: World,
    generator: Generator,
    seeds: int,
    *,
    families: int,
    methods: int = 4,
    budgets: int = 2,
    once: bool = False,
    gain: float = 0.0,
) -> Array:
    """Test accuracies [family, rate (tuned, auto), budget, method, seed]; the last method is better by `gain`."""
    draw, shape = NOISES[world.noise], (families, budgets, methods)
    curve = -world.curvature * (FACTORS - world.best) ** 2 - world.cliff * (FACTORS >= 2)
    trials = curve + world.tuning_noise * draw(generator, (*shape, 1 if once else seeds, len(FACTORS)))
    chosen = np.broadcast_to(curve[trials.argmax(-1)], (*shape, seeds))
    rates = np.stack([chosen, np.full_like(chosen, curve[AUTOMATIC])], axis=1)
    scale = world.final_noise * np.where(np.arange(methods) % 2, world.ratio, 1.0)
    found = 0.85 + rates + scale[:, None] * draw(generator, rates.shape)
    found[..., -1, :] += gain
    return np.round(found * world.examples) / world.examples


def scores(family: Array) -> dict[RowKey, dict[int, float]]:
    """One simulated comparison as its rows."""
    return {
        RowKey("simulated", f"epsilon {budget}", rate, f"method {method}"): dict(enumerate(values.tolist()))
        for rate, by_budget in zip(("tuned", "auto"), family, strict=True)
        for budget, by_method in enumerate(by_budget)
        for method, values in enumerate(by_method)
    }


def told_apart(family: Array) -> set[RowKey]:
    """The rows of which `vestige compare` says better or worse."""
    verdicts = judge(scores(family), "method 0")
    return {key for key, each in verdicts.items() if each.words.startswith(("better", "worse"))}


def as_before(family: Array, examples: int) -> bool:
    """Whether version 0.2 would have told any row apart: by paired t-tests of spreads of half an example or more."""
    gaps = (family[..., 1:, :] - family[..., :1, :]).reshape(len(family), -1, family.shape[-1])
    seeds = gaps.shape[-1]
    error = np.maximum(gaps.std(axis=-1, ddof=1), 0.5 / examples) / sqrt(seeds)
    return any(min(holm(p.tolist())) < ALPHA for p in 2 * stdtr(seeds - 1, -np.abs(gaps.mean(axis=-1)) / error))


def interval(found: int, of: int) -> tuple[float, float]:
    """The 95% interval of a probability (Clopper & Pearson 1934)."""
    low = float(beta.ppf(0.025, found, of - found + 1)) if found else 0.0
    return low, float(beta.ppf(0.975, found + 1, of - found)) if found < of else 1.0


def lines(arguments: argparse.Namespace) -> Iterator[str]:
    yield "| methods are equal, with | seeds | a false finding in % (95% interval) | as in 0.2 |"
    yield "|---|---|---|---|"
    sizes = {"families": arguments.families, "methods": arguments.methods, "budgets": arguments.budgets}
    for world in [*WORLDS, UNEQUAL]:
        for seeds in arguments.seeds:
            generator = np.random.default_rng(seeds)
            false = sum(bool(told_apart(each)) for each in accuracies(world, generator, seeds, **sizes))
            once = accuracies(world, generator, seeds, once=True, **sizes)
            before = sum(as_before(each, world.examples) for each in once)
            (low, high), (low_then, high_then) = (interval(each, arguments.families) for each in (false, before))
            now, then = (100 * each / arguments.families for each in (false, before))
            note = " (not exchangeable)" if world is UNEQUAL else ""
            yield (
                f"| {world.name}{note} | {seeds} | {now:.1f} ({100 * low:.1f} to {100 * high:.1f}) "
                f"| {then:.1f} ({100 * low_then:.1f} to {100 * high_then:.1f}) |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", type=int, default=2000, help="simulated comparisons of each kind")
    parser.add_argument("--seeds", type=int, nargs="*", default=[2, 5, 9, 20])
    parser.add_argument("--methods", type=int, default=4)
    parser.add_argument("--budgets", type=int, default=2)
    for line in lines(parser.parse_args()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
