"""Do the members of DPSGD-BR's models stay hidden? Table 3 of its paper again: membership inference on CIFAR-10.

The paper says neither which model was attacked nor how many shadow models there were. Here one model serves all
methods, each takes as many steps, and the noise is calibrated to epsilon by the valid accountant; without privacy it is
Adam.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vestige.audit.inference import NON_PRIVATE, OnModels, infer_membership
from vestige.methods.base import Method
from vestige.methods.registry import make_method

NAME = "br-table3"
PAPER = "DPSGD-BR (Sci Rep 2026)"
WHAT = "areas under the ROC of membership inference on CIFAR-10"
EPSILONS = (1, 2, 3, 4)
METHODS = ("dpsgd", "dpsur", "dpsgd-br", NON_PRIVATE)
"""As the paper calls them."""
ATTACKS = {"shadow": "black-box shadow", "gradients": "white-box partial"}
"""Ours, and what the paper calls them; LiRA and the loss are made too, and it has none of them."""
NOTES = (
    "the paper names neither the model attacked nor the number of shadow models",
    "noise by the valid accountant; the loss test of dpsur and dpsgd-br has the noise of the paper's Table 4",
    "without privacy: Adam, until the members are learned",
)
Case = tuple[str, int | None]


@dataclass(frozen=True)
class Study:
    """How large it is."""

    task: str = "cifar10-cnn"
    examples: int = 50_000
    shadows: int = 8
    targets: int = 5
    rate: float = 0.05
    steps: int = 200
    epochs: int = 80
    """Of a model without privacy."""
    epsilons: Sequence[int] = EPSILONS

    def cases(self) -> list[Case]:
        return [(name, epsilon) for name in METHODS for epsilon in ((None,) if name == NON_PRIVATE else self.epsilons)]

    def infer(
        self, case: Case, printed: Mapping[str, Any], data: str | None, device: str, on_models: OnModels | None = None
    ) -> dict[str, object]:
        """One line of the table; `printed` are the paper's figures."""
        name, epsilon = case
        found = infer_membership(
            self._method(name, printed["table4_initial_parameters_epsilon_1"]["cifar10"]["sigma_v"]),
            task=self.task,
            data=data,
            shadows=self.shadows,
            targets=self.targets,
            examples=self.examples,
            epsilon=epsilon,
            sample_rate=self.rate,
            steps=round(self.epochs / self.rate) if name == NON_PRIVATE else self.steps,
            device=device,
            on_models=on_models,
        )
        return {"name": name, "budget": epsilon, "study": self.to_json(), **found.to_json()}

    def _method(self, name: str, sigma_v: float) -> Method | str:
        if name in ("dpsur", "dpsgd-br"):
            return make_method(name, sigma_v=sigma_v, validation_batch=max(1, self.examples // 200))
        return make_method("dp-sgd") if name == "dpsgd" else name

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "epsilons": list(self.epsilons)}


def small(data: str | None) -> Study:
    """Minutes on a CPU: an MLP on 5,000 images, or on digits, where models without privacy are hardly open."""
    few = {"shadows": 4, "targets": 3, "steps": 60, "epochs": 30, "epsilons": (1,)}
    task, examples = ("digits-mlp", 400) if data is None else ("cifar10-mlp", 5_000)
    return Study(task, examples, **few)  # type: ignore[arg-type]


def beside(lines: Iterable[Mapping[str, Any]], printed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the paper printed and what was found, attack by attack and method by method."""
    rows = []
    ordered = sorted(lines, key=lambda line: (METHODS.index(line["name"]), line["budget"] or 0))
    for attack in (*ATTACKS, "lira", "lira-offline", "loss"):
        for line in ordered:
            found = line["attacks"][attack]
            rows.append(
                {
                    "attack": ATTACKS.get(attack, attack),
                    "method": line["name"],
                    "epsilon": line["budget"],
                    "printed": _printed(printed["table3_mia_auc_cifar10"], attack, line["name"], line["budget"]),
                    "area": found["area"],
                    "detected_at_1_percent": found["detected_at_1_percent"]["estimate"],
                    "nonprivate_accuracy_of_members": line["nonprivate_accuracy_of_members"],
                    "nonprivate_accuracy_of_others": line["nonprivate_accuracy_of_others"],
                }
            )
    return rows


def _printed(table: Mapping[str, Any], attack: str, name: str, epsilon: int | None) -> float | None:
    row = table[ATTACKS[attack]].get(name) if attack in ATTACKS else None
    return row if row is None or epsilon is None else row[EPSILONS.index(epsilon)]
