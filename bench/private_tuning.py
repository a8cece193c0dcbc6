"""Is it worth some epsilon to choose the automatic rate's constant privately? Against the rule alone, at equal epsilon.

usage: python bench/private_tuning.py --data FOLDER [--only svhn ...] [--seeds N] [--factors 1 4] [--noisier 3]

One way spends the whole budget on one run at the automatic rate. The other makes one trial for each multiple of that
rate on four fifths of the data, each with `--noisier` times the noise of the final run, counts how many examples of the
other fifth each gets right, adds Gaussian noise to these counts, and runs on all data at the multiple that won. The
rule carries the choice: it knows the final run's noise. Everything is charged: trials, counts and final run compose to
the same epsilon (`accounting.composed_epsilon`), as if every example had been in all of them. Pairs share a seed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Literal

import numpy as np
import torch

from vestige import tasks
from vestige.accounting import calibrate, composed_epsilon
from vestige.compare.execute_run import Machine, perform
from vestige.compare.statistics import exchange_p, holm, summarise
from vestige.priced_questions import Gaussian, SampledGaussian
from vestige.run_records import PrivacyTarget, Run, completed

DELTA, HOLDOUT = 1e-5, 0.2
COUNT_NOISE = 10.0
"""The standard deviation of the noise of each count; one example changes every count by one at most."""


@dataclass(frozen=True)
class Setting:
    task: str
    epsilon: float
    steps: int
    sample_rate: float

    def run(self, stage: Literal["tuning", "auto", "given"], multiplier: float, factor: float, seed: int) -> Run:
        return Run(
            task=self.task,
            label="dp-sgd",
            method="dp-sgd",
            options={},
            budget=PrivacyTarget("noise_multiplier", multiplier),
            sample_rate=self.sample_rate,
            steps=self.steps,
            delta=DELTA,
            stage=stage,
            lr=None,
            factor=factor,
            seed=seed,
            holdout=HOLDOUT if stage == "tuning" else 0.0,
            evaluations=0,
            reproducible=False,
            physical_batch=None,
        )


SETTINGS = {
    "svhn": Setting("svhn-mlp", 8.0, 1000, 0.04),
    "cifar10": Setting("cifar10-mlp", 3.0, 300, 0.04),
    "digits": Setting("digits-mlp", 3.0, 200, 0.05),
}
"""The rule's worst task in docs/learning-rate.md, and two where it is near the best."""


def noise_multipliers(setting: Setting, trials: int, noisier: float) -> tuple[float, float]:
    """Of one run that spends everything, and of a final run that leaves enough for its trials and counts."""

    def history(count: int, multiplier: float) -> dict[SampledGaussian | Gaussian, int]:
        made: dict[SampledGaussian | Gaussian, int] = {SampledGaussian(setting.sample_rate, multiplier): setting.steps}
        if count:
            made[SampledGaussian(setting.sample_rate, noisier * multiplier)] = count * setting.steps
            made[Gaussian(COUNT_NOISE / sqrt(count))] = 1
        return made

    alone, after = (calibrate(lambda z, n=n: history(n, z), setting.epsilon, DELTA) for n in (0, trials))  # type: ignore[misc]
    assert composed_epsilon([history(trials, after)], DELTA) <= setting.epsilon
    return alone, after


def scores(runs: Sequence[Run], machine: Machine) -> dict[tuple[float, int], float]:
    done = completed(perform(list(runs), machine))
    assert len(done) == len(runs)
    return {(each.run.factor, each.run.seed): each.score for each in done}


def study(name: str, arguments: argparse.Namespace) -> dict[str, object]:
    setting, factors, seeds = SETTINGS[name], arguments.factors, range(arguments.seeds)
    machine = Machine(arguments.device, {setting.task: arguments.data} if name != "digits" else {})
    alone, after = noise_multipliers(setting, len(factors), arguments.noisier)
    automatic = scores([setting.run("auto", alone, 1.0, seed) for seed in seeds], machine)
    trials = [setting.run("tuning", arguments.noisier * after, each, 1000 + seed) for each in factors for seed in seeds]
    judged = scores(trials, machine)
    held_out = round(HOLDOUT * len(tasks.load(setting.task, machine.data.get(setting.task), 0).train[1]))
    generator = np.random.default_rng()
    chosen = {}
    for seed in seeds:
        counts = {each: judged[each, 1000 + seed] * held_out + generator.normal(0, COUNT_NOISE) for each in factors}
        chosen[seed] = max(counts, key=lambda each: counts[each])
    finals = [setting.run("given", after, chosen[seed], seed) for seed in seeds]
    tuned = {seed: score for (_, seed), score in scores(finals, machine).items()}
    gaps = [tuned[seed] - automatic[1.0, seed] for seed in seeds]
    return {
        "name": name,
        "automatic": summarise(list(automatic.values())),
        "tuned": summarise(list(tuned.values())),
        "difference": summarise(gaps),
        "p": exchange_p(gaps),
        "noise": (alone, after),
        "chosen": [chosen[seed] for seed in seeds],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with the datasets")
    parser.add_argument("--only", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument("--factors", type=float, nargs="*", default=[1.0, 4.0])
    parser.add_argument("--noisier", type=float, default=3.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        rows.append(study(name, arguments))
        print(rows[-1], flush=True)
    print("| task, epsilon, steps | automatic | chosen privately | difference | p (Holm) | multiples chosen | noise |")
    print("|---|---|---|---|---|---|---|")
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):  # type: ignore[misc]
        setting, gap = SETTINGS[str(row["name"])], row["difference"]
        means = (f"{100 * row[key].mean:.1f}" for key in ("automatic", "tuned"))  # type: ignore[attr-defined]
        chosen = ", ".join(f"{each:g}" for each in row["chosen"])  # type: ignore[attr-defined]
        between = f"{100 * gap.mean:+.1f} ({100 * gap.low:+.1f} to {100 * gap.high:+.1f})"  # type: ignore[attr-defined]
        noise = " to ".join(f"{each:.3g}" for each in row["noise"])  # type: ignore[attr-defined]
        where = f"{setting.task}, {setting.epsilon:g}, {setting.steps}"
        print(f"| {where} | {' | '.join(means)} | {between} | {p:.2g} | {chosen} | {noise} |")


if __name__ == "__main__":
    main()
