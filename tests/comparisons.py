"""What do the tests of comparisons share? Small specifications, and records of runs that nobody trained."""

import json
from dataclasses import replace

from vestige.compare.specification import Contender, Problem, Specification
from vestige.methods.registry import METHODS
from vestige.run_records import FORMAT_VERSION, PrivacyTarget, Run, read_record

TINY = Specification(
    problems=(Problem("digits-mlp"),),
    contenders=(Contender("dp-sgd", "dp-sgd"), Contender("fo", "fo-dp-sgd", {"beta": 0.8})),
    budgets=(PrivacyTarget("epsilon", 3.0), PrivacyTarget("epsilon", 8.0)),
    seeds=(0, 1, 2),
    steps=6,
    factors=(0.5, 1.0, 2.0),
)
AUTO = replace(TINY, rates=("auto",), seeds=(0,), budgets=(PrivacyTarget("epsilon", 3.0),), steps=2)
SMALL = Specification(
    problems=(Problem("digits-mlp"),),
    contenders=(
        Contender("dp-sgd", "dp-sgd"),
        Contender("fo", "fo-dp-sgd"),
        Contender("bad", "fo-dp-sgd", {"beta": 9}),
    ),
    budgets=(PrivacyTarget("noise_multiplier", 1.0), PrivacyTarget("noise_multiplier", 2.0)),
    seeds=(0, 1, 2),
    steps=8,
    factors=(0.5, 1.0),
)
MANY = ["dp-sgd", *(name for name in METHODS if name != "dp-sgd"), "dp-sgd:groups=layers"]
"""More methods than there are colours."""


def known():
    return {"dp-sgd": ["clip", "momentum"], "fo-dp-sgd": ["beta", "window"]}


def fake(run: Run, score: float, **more):
    """A record as executing a run makes it, without training anything; `more` are further parts of its file."""
    tuning = run.stage == "tuning"
    content = {
        "version": FORMAT_VERSION,
        "id": run.id,
        "run": run.to_json(),
        "status": "done",
        ("nonprivate_validation_accuracy" if tuning else "accuracy"): score,
        "epsilon": run.budget.value,
        "delta": run.delta,
        "accountant": "pld",
        "epsilon_rdp": run.budget.value,
        "budget": run.budget.amount("epsilon"),
        "noise_multiplier": 1.0,
        "sample_rate": run.sample_rate,
        "expected_batch": 71.85,
        "lr": 0.1,
        "lr_reason": "lr: as given",
        "asked": 0,
        "adjacency": "add/remove one example",
        "steps": run.steps,
        "seconds": 1.0,
        "stopped": "finished",
        "charged": [],
        "noise": "secret",
        "sampling": "poisson",
        ("nonprivate_validation_curve" if tuning else "curve"): [],
        "pictures": {},
        "stacked": 1,
        "memory_mb": 1.0,
    }
    return read_record({**content, **more})


def changed(record, **parts):
    """The record that a file with these parts changed would hold."""
    return read_record({**record.to_json(), **parts})


def files(folder):
    """Every record as its file holds it, by id."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.runs.glob("*.json"))}


def one_cell(differences):
    """A report's content of one cell: by method its difference from dp-sgd, the ends of its interval, and the verdict."""
    rows = [
        {
            "task": "t",
            "budget": "epsilon 3",
            "budget_value": 3.0,
            "rate": "auto",
            "method": name,
            "mean": 0.5 + middle,
            "difference": middle,
            "difference_low": low,
            "difference_high": high,
            "sentence": f"{word} from dp-sgd at epsilon 3",
        }
        for name, (middle, low, high, word) in {"dp-sgd": (0.0, 0.0, 0.0, "the baseline"), **differences}.items()
    ]
    labels = [{"label": row["method"]} for row in rows]
    problems = {"problems": [{"task": "t"}], "contenders": labels, "baseline": "dp-sgd", "choose": "each seed"}
    summary = {"baseline": "dp-sgd", "rows": rows, "choices": [], "tested": 1, "seeds_to_tell": 6}
    return {"summary": summary, "specification": problems, "records": []}
