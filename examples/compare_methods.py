"""Which method is best at one epsilon? A comparison in a folder, as `vestige compare` makes it, from Python."""

from vestige.compare.aggregate_results import rows
from vestige.compare.runner import compare
from vestige.compare.specification import Contender, Problem, Specification
from vestige.run_records import PrivacyTarget

SEEDS, STEPS = 5, 60

if __name__ == "__main__":  # worker processes import this file
    specification = Specification(
        problems=(Problem("digits-mlp"),),
        contenders=tuple(Contender(name, name) for name in ("dp-sgd", "fo-dp-sgd", "kalman-memory")),
        budgets=(PrivacyTarget("epsilon", 3.0),),
        seeds=tuple(range(SEEDS)),
        steps=STEPS,
        sample_rate=0.1,
        rates=("auto",),  # no tuning, so nothing more to pay for
    )
    folder = compare("my-comparison", specification)  # killed and called again, it goes on where it was
    for row in rows(folder.records().values(), specification.baseline):
        print(row["method"], f"{row['mean']:.1%}", row["sentence"])
