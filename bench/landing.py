"""What does the landing page show? Accuracy on CIFAR-10 by epsilon, read from docs/results/records.md.

python bench/landing.py        # writes docs/results/accuracy.svg; needs matplotlib
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs" / "results"


def rows(task: str) -> list[tuple[float, str, float]]:
    """Epsilon, recipe and accuracy of every row about a task."""
    found = re.findall(
        rf"^\| {task} \| (\S+) \| `([^`]+)`[^|]*\| ([\d.]+)", (DOCS / "records.md").read_text(), flags=re.M
    )
    return [(float(epsilon), recipe, float(ours)) for epsilon, recipe, ours in found]


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "vestige"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.2))
    every = rows("CIFAR-10")
    best = {each: max(ours for epsilon, _, ours in every if epsilon == each) for each, _, _ in every}
    axes.plot(*zip(*sorted(best.items()), strict=True), color="#2a6f97", marker="o", label="our best recipe")
    axes.scatter([epsilon for epsilon, *_ in every], [ours for *_, ours in every], color="#bbbbbb", s=14, zorder=1)
    for epsilon, accuracy in best.items():
        axes.annotate(f"{accuracy:g}", (epsilon, accuracy), textcoords="offset points", xytext=(0, 7), ha="center")
    axes.set(
        xlabel="epsilon, at delta 1e-5", ylabel="test accuracy, %", ylim=(50, 84), title="CIFAR-10, all 50,000 images"
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(DOCS / "accuracy.svg", metadata={"Date": None})


if __name__ == "__main__":
    draw()
