"""Who was trained on? Membership inference on CIFAR-10 with and without privacy, beside Table 3 of DPSGD-BR's paper.

usage: python bench/membership.py --data DIR [--device cuda] [--shadows 16] [--targets 5] [--out membership.json]
       python bench/membership.py --small [--data DIR]
       python bench/membership.py --out membership.json --into PAGE.md

Every line (method, epsilon) trains shadow models and targets on random halves and is written when it is done; started
again with the same --out, only the missing ones are made. --small is an MLP, few models and epsilon 1: on 5,000 images
of --data, where models without privacy are wide open (areas above 0.9), or without it on scikit-learn's digits, which
generalise so well that these are hardly so (0.60 by outputs, 0.69 by LiRA). The last form makes nothing but the table.

The paper says neither which model was attacked nor how many shadow models there were. Ours: one model for all methods,
--steps steps each, noise calibrated to epsilon by the valid accountant (the test of selective methods has the noise of
the paper's Table 4), automatic learning rates; without privacy Adam, for --epochs epochs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vestige.audit.inference import NON_PRIVATE, infer_membership
from vestige.compare.presets import published
from vestige.files import write_json
from vestige.methods.base import Method
from vestige.methods.registry import build

EPSILONS = (1, 2, 3, 4)
METHODS = ("dpsgd", "dpsur", "dpsgd-br", NON_PRIVATE)
ATTACKS = {"shadow": "black-box shadow", "gradients": "white-box partial"}
"""Ours, and what the paper calls them; LiRA and the loss are made too, and it has none of them."""
PRINTED = published()["dpsgd_br"]["table3_mia_auc_cifar10"]
SIGMA_V = published()["dpsgd_br"]["table4_initial_parameters_epsilon_1"]["cifar10"]["sigma_v"]


def method_of(name: str, members: int) -> Method | str:
    if name in ("dpsur", "dpsgd-br"):
        return build(name, sigma_v=SIGMA_V, validation_batch=max(1, members // 100))
    return build("dp-sgd") if name == "dpsgd" else name


def line(name: str, epsilon: int | None, asked: argparse.Namespace) -> dict[str, Any]:
    private = name != NON_PRIVATE
    found = infer_membership(
        method_of(name, asked.examples // 2),
        task=asked.task,
        data=asked.data,
        shadows=asked.shadows,
        targets=asked.targets,
        examples=asked.examples,
        epsilon=epsilon,
        sample_rate=asked.rate,
        steps=asked.steps if private else round(asked.epochs / asked.rate),
        device=asked.device,
    )
    return {"name": name, "budget": epsilon, "asked": settings(asked), **found.to_json()}


def settings(asked: argparse.Namespace) -> dict[str, Any]:
    """What tells lines apart that must not stand in one table."""
    return {key: getattr(asked, key) for key in ("task", "shadows", "targets", "examples", "rate", "steps", "epochs")}


def printed(attack: str, name: str, epsilon: int | None) -> float | None:
    row = PRINTED[ATTACKS[attack]].get(name) if attack in ATTACKS else None
    return row if row is None or epsilon is None else row[EPSILONS.index(epsilon)]


def table(lines: list[dict[str, Any]]) -> str:
    head = (
        "| attack | method | epsilon | printed | ours, ROC area | detected at 1% false alarms | right about members, "
        "others |\n|---|---|---|---|---|---|---|\n"
    )
    rows = []
    for attack in (*ATTACKS, "lira", "lira-offline", "loss"):
        for each in sorted(lines, key=lambda row: (METHODS.index(row["name"]), row["budget"] or 0)):
            found, paper = each["attacks"][attack], printed(attack, each["name"], each["budget"])
            area, detected = found["area"], found["detected_at_1_percent"]
            rows.append(
                f"| {ATTACKS.get(attack, attack)} | {each['name']} | {each['budget'] or '-'} | "
                f"{'-' if paper is None else f'{paper:.3f}'} | {area['estimate']:.3f} ({area['low']:.3f} to "
                f"{area['high']:.3f}) | {detected['estimate']:.3f} | {each['nonprivate_accuracy_of_members']:.1%}, "
                f"{each['nonprivate_accuracy_of_others']:.1%} |"
            )
    return head + "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a folder with CIFAR-10")
    parser.add_argument("--small", action="store_true", help="an MLP, few models, epsilon 1")
    parser.add_argument("--task", help="default: cifar10-cnn; --small: cifar10-mlp, or digits-mlp without --data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shadows", type=int, help="default: 16; --small: 4")
    parser.add_argument("--targets", type=int, help="default: 5; --small: 3")
    parser.add_argument("--examples", type=int, help="default: 50,000; --small: 5,000, of digits 400")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--steps", type=int, help="of a private model; default: 300, --small: 60")
    parser.add_argument("--epochs", type=int, default=30, help="of a non-private model")
    parser.add_argument("--epsilons", type=int, nargs="+", choices=EPSILONS)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--out", type=Path, help="default: membership.json, or membership-small.json")
    parser.add_argument("--into", type=Path, help="a Markdown file: its table is replaced by what --out holds")
    asked = parser.parse_args()
    images = asked.data is not None or not asked.small
    usual = {
        "task": ("cifar10-cnn", "cifar10-mlp" if images else "digits-mlp"),
        "shadows": (16, 4),
        "targets": (5, 3),
        "examples": (50_000, 5_000 if images else 400),
        "steps": (300, 60),
        "epsilons": (EPSILONS, (1,)),
        "out": (Path("membership.json"), Path("membership-small.json")),
    }
    for key, (whole, small) in usual.items():
        if getattr(asked, key) is None:
            setattr(asked, key, small if asked.small else whole)
    lines = json.loads(asked.out.read_text())["lines"] if asked.out.exists() else []
    if asked.into is not None:
        before, _, rest = asked.into.read_text().partition("<!-- table -->\n")
        _, _, after = rest.partition("<!-- end -->")
        asked.into.write_text(f"{before}<!-- table -->\n{table(lines)}<!-- end -->{after}")
        return
    if any(each["asked"] != settings(asked) for each in lines):
        parser.error(f"--out {asked.out} holds lines of other settings: name another file")
    done = {(each["name"], each["budget"]) for each in lines}
    for name in asked.methods:
        for epsilon in (None,) if name == NON_PRIVATE else asked.epsilons:
            if (name, epsilon) not in done:
                lines.append(line(name, epsilon, asked))
                write_json(asked.out, {"lines": lines})
                print(f"{name}, epsilon {epsilon}: {lines[-1]['seconds']} s", flush=True)
    print(table(lines))


if __name__ == "__main__":
    main()
