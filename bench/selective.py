"""What do selective updates buy under a guarantee that holds? Accuracy at epsilon 1 to 4, beside the published table.

usage: python bench/selective.py --data DIR [--device cuda] [--engine NAME] [--seeds 3] [--out selective.json]

Every cell (dataset, method, epsilon, seed) is one run and is written when it is done; started again with the same
--out, only the missing ones are run. Selective methods give two accuracies: where the valid accountant has spent
epsilon, and, further on in the same run, where the papers' accepted-only claim has. Settings are those of the papers
(batch, noise, rate, clip, momentum); nothing was tuned here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import vestige
from vestige import accounting, planning, tasks
from vestige.files import write_json
from vestige.jobs import selection
from vestige.method import Method, build
from vestige.training import accuracy

DELTA = 1e-5
EPSILONS = (1, 2, 3, 4)
DATA = {"mnist": "mnist.npz", "fmnist": "fashion_mnist.npz"}
METHODS = ("dpsgd", "dpsgd-ts", "dpsgd-hf", "dpsur", "dpsgd-br")
TASK = {"dpsgd": "cnn", "dpsgd-ts": "ts"}
"""The model: a small CNN, DPSGD-TS's tanh CNN, and for the others scattering features with a CNN."""

BATCH = {"mnist": 1024, "fmnist": 2048}
END_TO_END = {"mnist": (512, 0.5, 40), "fmnist": (2048, 4.0, 40)}
"""Batch, rate and epochs of the end-to-end CNNs (Tramer & Boneh 2021)."""
RATE = {"dpsgd-hf": {"mnist": 1.0, "fmnist": 4.0}, "dpsur": {"mnist": 2.0, "fmnist": 4.0}}
RATE["dpsgd-br"] = {"mnist": 2.75, "fmnist": 6.0}
SIGMA_T = {"mnist": (2.0, 1.5, 1.35, 1.35), "fmnist": (4.0, 2.15, 2.15, 2.15)}
SIGMA_V = {"mnist": (1.3, 1.0, 0.9, 0.8), "fmnist": (1.3, 1.3, 0.8, 0.8)}
"""DPSUR's noise by epsilon; DPSGD-HF takes the same sigma_t, and as many steps as it then affords."""
BUFFERED = {"mnist": (3.0, 1.37), "fmnist": (6.0, 1.3)}
"""DPSGD-BR's noise at epsilon 1 (its Table 4); at larger epsilon it shrinks as DPSUR's does, since none is printed."""
SELECTIVE = ("dpsur", "dpsgd-br")


def method_of(name: str, dataset: str, epsilon: int, options: dict[str, Any]) -> Method:
    """A method with the noise of its paper at this epsilon."""
    place = EPSILONS.index(epsilon)
    sigma_t, sigma_v = SIGMA_T[dataset][place], SIGMA_V[dataset][place]
    if name not in SELECTIVE:
        return vestige.dp_sgd(clip=0.1, momentum=0.9)
    if name == "dpsgd-br":
        first_t, first_v = BUFFERED[dataset]
        sigma_t, sigma_v = first_t * sigma_t / SIGMA_T[dataset][0], first_v * sigma_v / SIGMA_V[dataset][0]
    return build(name, sigma_t=sigma_t, sigma_v=sigma_v, **options)


class Passing:
    """A budget that is noted when it is first exceeded, and lets the run go on: past it there is no guarantee."""

    def __init__(self, limit: Any, note: Callable[[], None]) -> None:
        self.limit, self.note, self.passed = limit, note, False

    def allows(self, spent: accounting.History, question: Any) -> bool:
        if not self.passed and not self.limit.allows(spent, question):
            self.passed = True
            self.note()
        return True


def plain(name: str, dataset: str, epsilon: int, task: tasks.Task, common: dict[str, Any]) -> dict[str, Any]:
    method = method_of(name, dataset, epsilon, {})
    examples = len(task.train[1])
    if name in TASK:
        batch, lr, epochs = END_TO_END[dataset]
        plan: dict[str, Any] = {"steps": epochs * examples // min(batch, examples // 4), "epsilon": epsilon}
    else:
        batch, lr = BATCH[dataset], RATE[name][dataset]
        plan = {"steps": None, "noise_multiplier": SIGMA_T[dataset][EPSILONS.index(epsilon)], "epsilon": epsilon}
    rate = min(batch, examples // 4) / examples
    training = vestige.train(
        task.model, task.loss, task.train, method=method, sample_rate=rate, lr=lr, delta=DELTA, **plan, **common
    )
    for _ in training:
        pass
    promise = training.guarantee()
    return {"accuracy": accuracy(task.model, task.test), "epsilon_valid": promise.epsilon, "steps": training.state.step}


def selective(
    name: str, dataset: str, epsilon: int, task: tasks.Task, common: dict[str, Any], options: dict[str, Any]
) -> dict[str, Any]:
    method, examples = method_of(name, dataset, epsilon, options), len(task.train[1])
    rate = min(BATCH[dataset], examples // 4) / examples
    gate = method.gate.at(examples)
    asked = gate.questions(method.probe.questions(rate, method.noise_multiplier or 0.0))
    one = {question: 1 for question in asked}
    adaptive = gate.adaptive
    trials = planning.affordable(one, epsilon, DELTA, "rdp" if adaptive else "pld")
    training = vestige.train(
        task.model,
        task.loss,
        task.train,
        method=method,
        sample_rate=rate,
        lr=RATE[name][dataset],
        delta=DELTA,
        steps=50 * trials,
        epsilon=1000.0 if adaptive else None,
        **common,
    )
    result: dict[str, Any] = {}

    def note(suffix: str = "") -> None:
        seen = selection(training)
        result.update({f"{key}{suffix}": seen[key] for key in ("trials", "accepted", "updates", "degraded")})
        result[f"accuracy{suffix}"] = accuracy(task.model, task.test)
        result[f"published_claim_epsilon{suffix}"] = seen["published_claim_epsilon"]

    planned = {question: trials for question in one}
    limit = planning.Filter(epsilon, DELTA, one) if adaptive else accounting.Budget(epsilon, DELTA, planned)
    passing = Passing(limit, note)
    training.ledger.budget = passing
    claimed = False
    for record in training:
        if record.accepted and not claimed and selection(training)["published_claim_epsilon"] >= epsilon:
            claimed = True
            note("_at_claim")
            result["renyi_epsilon_at_claim"] = accounting.epsilon(training.ledger.spent, DELTA, "rdp")
            if not adaptive:
                result["epsilon_at_claim"] = accounting.epsilon(training.ledger.spent, DELTA)
        if claimed and passing.passed:
            break
    return {"epsilon_valid": epsilon, "accountant": "renyi filter" if adaptive else "pld", **result}


def table(results: list[dict[str, Any]], published: dict[str, Any]) -> str:
    """Mean test accuracy in percent over seeds; the DPSGD-BR paper's Table 2 in brackets."""
    lines = []
    for dataset in DATA:
        lines += [f"\n{dataset}", "| method | " + " | ".join(f"epsilon {e}" for e in EPSILONS) + " |"]
        lines.append("|---" * (1 + len(EPSILONS)) + "|")
        for name in METHODS:
            rows = [("", "accuracy")] + [(" until the claim", "accuracy_at_claim")] * (name in SELECTIVE)
            for label, key in rows:
                cells = []
                for place, epsilon in enumerate(EPSILONS):
                    found = [
                        100 * row[key]
                        for row in results
                        if (row["dataset"], row["method"], row["epsilon"]) == (dataset, name, epsilon) and key in row
                    ]
                    paper = published.get(dataset, {}).get(name, [float("nan")] * 4)[place]
                    ours = f"{sum(found) / len(found):.2f} (n={len(found)})" if found else "not run"
                    cells.append(f"{ours} [{paper:.2f}]")
                lines.append(f"| {name}{label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with mnist.npz and fashion_mnist.npz")
    parser.add_argument("--out", type=Path, default=Path("selective.json"))
    parser.add_argument("--published", type=Path, help="published.json, for the brackets")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", default="bookkeeping")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--datasets", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--epsilons", nargs="*", type=int, default=list(EPSILONS), choices=EPSILONS)
    parser.add_argument("--progress", default="noisy-loss", help="what DPSGD-BR's decay listens to")
    parser.add_argument("--accounting", default="trial-level", choices=("trial-level", "every-trial"))
    parser.add_argument("--examples", type=int, help="only the first so many training examples: a rehearsal")
    parser.add_argument("--budget-seconds", type=float, default=float("inf"), help="start no run after so long")
    given = parser.parse_args()

    results: list[dict[str, Any]] = json.loads(given.out.read_text()) if given.out.exists() else []
    published = (
        json.loads(given.published.read_text())["dpsgd_br"]["table2_accuracy_percent"] if given.published else {}
    )
    done = {(row["dataset"], row["method"], row["epsilon"], row["seed"]) for row in results}
    begin = time.perf_counter()
    cells = itertools.product(range(given.seeds), given.datasets, given.methods, given.epsilons)
    for seed, dataset, name, epsilon in cells:
        if (dataset, name, epsilon, seed) in done or time.perf_counter() - begin > given.budget_seconds:
            continue
        task = load(f"{dataset}-{TASK.get(name, 'hf')}", given.data / DATA[dataset], seed, given)
        common = {"engine": given.engine}
        since = time.perf_counter()
        if name in SELECTIVE:
            options: dict[str, Any] = {"accounting": given.accounting}
            if name == "dpsgd-br":
                options["progress"] = given.progress
            found = selective(name, dataset, epsilon, task, common, options)
        else:
            found = plain(name, dataset, epsilon, task, common)
        cell = {"dataset": dataset, "method": name, "epsilon": epsilon, "seed": seed, "examples": len(task.train[1])}
        results.append({**cell, **found, "seconds": round(time.perf_counter() - since, 1)})
        write_json(given.out, results)
        print(json.dumps(results[-1]), flush=True)
    print(table(results, published))


EXAMPLES: dict[str, tuple[Any, Any]] = {}


def load(name: str, data: Path, seed: int, given: argparse.Namespace) -> tasks.Task:
    """The task with this seed's initial weights; its examples are read and moved to the device once."""
    task = tasks.load(name, data, seed)
    kind = name if name.endswith("hf") else name.split("-")[0]
    if kind not in EXAMPLES:
        first = slice(given.examples)
        train, test = (tuple(part[first].to(given.device) for part in parts) for parts in (task.train, task.test))
        EXAMPLES[kind] = (train, test)
    train, test = EXAMPLES[kind]
    model = task.model.to(given.device)
    return tasks.Task(name, model, task.loss, train, test, task.classes, task.notes)


if __name__ == "__main__":
    main()
