"""How near to the accountant does an audit come, and does it notice a fault? Gradient canaries, every release seen.

usage: python bench/audit.py [--runs 40000] [--epsilons 1 3 8] [--out audit.json] [--into docs/results/audit.md]

Every line is an audit of DP-SGD on made-up examples and a linear model: 100 steps at rate 0.05, half of the runs with
the canary, at 99.99% confidence. The faulty ones have 0.7 of the noise that is priced, or a clip that lets twice the
bound through, put into the mechanism's own code. Lines that --out holds already are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vestige.audit.in_and_out import audit
from vestige.compare.stacked import curator
from vestige.files import write_json
from vestige.randomness import lattice

CONFIDENCE, DELTA, RATE, STEPS, OTHERS = 0.9999, 1e-5, 0.05, 100, 20


@contextlib.contextmanager
def less_noise(share: float) -> Iterator[None]:
    """Inside, noise on the lattice has this share of its deviation."""
    whole = lattice.add_steps
    lattice.add_steps = lambda total, spacing, *rest, **more: whole(total, spacing * share, *rest, **more)
    try:
        yield
    finally:
        lattice.add_steps = whole


@contextlib.contextmanager
def looser_clip(times: float) -> Iterator[None]:
    """Inside, an example may move a sum by so many times its bound."""
    whole = curator.weights
    curator.weights = lambda clip, norms: times * whole(clip, norms)
    try:
        yield
    finally:
        curator.weights = whole


FAULTS: dict[str, Any] = {
    "none": contextlib.nullcontext,
    "0.7 of the noise": lambda: less_noise(0.7),
    "twice the bound": lambda: looser_clip(2.0),
}


def line(epsilon: float, fault: str, runs: int) -> dict[str, Any]:
    with FAULTS[fault]():
        found = audit(
            "dp-sgd", epsilon=epsilon, delta=DELTA, sample_rate=RATE, steps=STEPS, runs=runs, examples=OTHERS,
            confidence=CONFIDENCE,
        )  # fmt: skip
    return {"fault": fault, "budget": epsilon, **found.to_json()}


def table(lines: list[dict[str, Any]]) -> str:
    head = (
        "| fault | epsilon, at most | at least (99.99%, no assumption) | by the ROC's area: estimate, at least | noise "
        "over what was priced | ROC area, allowed | contradiction |\n|---|---|---|---|---|---|---|\n"
    )
    rows = []
    for each in sorted(lines, key=lambda row: (list(FAULTS).index(row["fault"]), row["budget"])):
        noise, area = each["noise_factor"], each["area"]
        rows.append(
            f"| {each['fault']} | {each['epsilon']:.3f} | {each['epsilon_lower_bound']:.3f} | "
            f"{each['epsilon_by_area']:.3f}, {each['epsilon_by_area_low']:.3f} | {noise['estimate']:.3f} "
            f"({noise['low']:.3f} to {noise['high']:.3f}) | {area['estimate']:.4f} ({area['low']:.4f} to "
            f"{area['high']:.4f}), {each['area_allowed']:.4f} | {'yes' if each['contradicts'] else 'no'} |"
        )
    return head + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40_000)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0, 8.0])
    parser.add_argument("--out", type=Path, default=Path("audit.json"))
    parser.add_argument("--into", type=Path, help="a Markdown file: its table is replaced by what --out holds")
    asked = parser.parse_args()
    lines = json.loads(asked.out.read_text())["lines"] if asked.out.exists() else []
    for fault in FAULTS:
        for epsilon in asked.epsilons:
            if not any(
                (each["fault"], each["budget"], each["wanted"]) == (fault, epsilon, asked.runs) for each in lines
            ):
                lines.append(line(epsilon, fault, asked.runs))
                write_json(asked.out, {"lines": lines})
                print(table(lines[-1:]).splitlines()[-1], flush=True)
    if asked.into is not None:
        text = asked.into.read_text()
        before, _, rest = text.partition("<!-- table -->\n")
        _, _, after = rest.partition("<!-- end -->")
        asked.into.write_text(f"{before}<!-- table -->\n{table(lines)}<!-- end -->{after}")


if __name__ == "__main__":
    main()
