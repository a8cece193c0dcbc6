"""How good are made-up rows, beside a peer's? Two tables of scikit-learn's and one of MNIST, at epsilon 1 and 3.

usage: python bench/synthesize_tables.py [--data FOLDER] [--peer PYTHON] [--epsilons 1 3] [--seeds N] [--bins N]
       [--sets NAMES] [--kinds MST AIM] [--json FILE]

Each table is cut into the same cells for everybody, by public bounds; four fifths of its rows are private, the rest
judges. Of what each method makes (as many rows as it was given): the accuracy on the held-out rows of a random forest
that is trained on the made-up rows, the mean total variation of all two-way marginals from the private ones', and the
seconds that fitting and sampling took. These figures compare with private rows without noise: they are for public
tables such as these. PYTHON is the interpreter of an environment with dpmm (`pip install dpmm`, Python 3.10 or 3.11),
whose MST and AIM are run on the same cells (--kinds; 1,000 iterations of inference, which is AIM's default and a tenth
of MST's); without it they are left out. FOLDER has mnist.npz, or that set is left
out. Settings are the same for all sets; the penalty
on a pair's noise was chosen among three after seeing breast cancer and digits by these splits, so our rows on them are
not untuned.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from vestige.synthesis import quality
from vestige.synthesis.schema import Codes, Column, columns_of, read_table
from vestige.synthesis.tables import TableRun, TableSynthesis

DELTA = 1e-5
LONGEST = 900
"""Seconds that a peer's run may take."""
OURS = ("marginals", "evolution")
PEER = """
import sys, time, json, warnings
warnings.filterwarnings("ignore")
import numpy as np, pandas as pd
from dpmm.models.aim import AIMGM
from dpmm.models.mst import MSTGM
file, kind, epsilon, delta, seed, out = sys.argv[1:]
held = np.load(file)
rows, sizes = held["rows"], held["sizes"]
names = [f"c{place}" for place in range(len(sizes))]
domain = dict(zip(names, map(int, sizes)))
begin = time.perf_counter()
kinds = {"MST": (MSTGM, 1000), "AIM": (AIMGM, 1000)}
model = kinds[kind][0](epsilon=float(epsilon), delta=float(delta), n_iters=kinds[kind][1], n_jobs=1)
model.set_random_state(np.random.RandomState(int(seed)))
model.set_domain(domain=domain)
model.fit(pd.DataFrame(rows, columns=names))
made = model.generate(n_records=len(rows))[names].to_numpy()
np.savez(out, rows=made, seconds=time.perf_counter() - begin)
"""


def tables(folder: Path | None) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Name, columns, and their public bounds; the label is the column y."""
    from sklearn.datasets import load_breast_cancer, load_digits

    cancer = load_breast_cancer()
    bounds = [(5, 30), (5, 40), (40, 200), (100, 2500), (0.04, 0.17), (0, 0.35), (0, 0.45), (0, 0.21), (0.1, 0.31),
              (0.04, 0.1)]  # fmt: skip
    names = [name.replace(" ", "_") for name in cancer.feature_names[:10]]
    yield (
        "breast-cancer",
        {**{name: cancer.data[:, place] for place, name in enumerate(names)}, "y": cancer.target},
        {**{name: tuple(map(float, each)) for name, each in zip(names, bounds, strict=True)}, "y": ["0", "1"]},
    )
    digits = load_digits()
    yield ("digits-4x4", *_pixels(digits.images.reshape(-1, 4, 2, 4, 2).mean((2, 4)), digits.target, 16.0))
    if folder is not None and (folder / "mnist.npz").exists():
        held = np.load(folder / "mnist.npz")
        images = held["x_train"][:20_000].reshape(-1, 28, 28)[:, 2:26, 2:26].reshape(-1, 4, 6, 4, 6).mean((2, 4))
        yield ("mnist-4x4", *_pixels(images, held["y_train"][:20_000], 255.0))


def _pixels(images: Any, labels: Any, most: float) -> tuple[dict[str, Any], dict[str, Any]]:
    flat = images.reshape(len(images), -1)
    columns = {f"p{place}": flat[:, place] for place in range(flat.shape[1])}
    return {**columns, "y": labels}, {**{name: (0.0, most) for name in columns}, "y": [str(c) for c in range(10)]}


def judged(made: Codes, private: Codes, held_out: Codes, columns: tuple[Column, ...]) -> dict[str, float]:
    label = len(columns) - 1
    right = quality.classifier(made, columns, label)(held_out) == held_out[:, label]
    errors = [quality.variation(made, private, columns, pair) for pair in combinations(range(len(columns)), 2)]
    return {"accuracy": float(right.mean()), "pair_error": float(np.mean(errors))}


def ours(method: str, private: Codes, columns: tuple[Column, ...], epsilon: float) -> tuple[Codes, float, float]:
    """Rows as cells, seconds, and the epsilon that was spent."""
    begin = time.perf_counter()
    # The curator is given cells as they are: each column's middle values fall into the same cells again.
    values = {
        column.name: column.decode(private[:, place], np.random.default_rng(0)) for place, column in enumerate(columns)
    }
    run = TableRun(TableSynthesis(data=values, columns=columns, epsilon=epsilon, delta=DELTA, method=method), None)
    made = run.complete()
    assert made is not None
    assert made.guarantee.epsilon is not None
    return read_table(made.rows, columns), time.perf_counter() - begin, made.guarantee.epsilon


def peer(python: str, kind: str, private: Codes, columns: tuple[Column, ...], epsilon: float, seed: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "rows.npz", Path(folder) / "made.npz"
        np.savez(given, rows=private, sizes=[column.cells for column in columns])
        words = [python, "-c", PEER, given, kind, epsilon, DELTA, seed, out]
        try:
            done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=LONGEST)
        except subprocess.TimeoutExpired:
            return None, f"took more than {LONGEST} seconds"
        if done.returncode:
            return None, done.stderr.strip().splitlines()[-1][:200]
        made = np.load(out)
        return made["rows"].astype(np.int64), float(made["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--peer")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--bins", type=int, default=16)
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--kinds", nargs="+", default=["MST"], choices=["MST", "AIM"])
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name, values, bounds in tables(given.data):
        if given.sets and name not in given.sets:
            continue
        columns = columns_of(bounds, given.bins)
        rows = read_table(values, columns)
        for seed in range(given.seeds):
            order = np.random.default_rng(seed).permutation(len(rows))
            private, held_out = rows[order[: len(rows) * 4 // 5]], rows[order[len(rows) * 4 // 5 :]]
            found.append({"set": name, "method": "the rows themselves", "epsilon": None, "seed": seed,
                          **judged(private, private, held_out, columns)})  # fmt: skip
            for epsilon in given.epsilons:
                for method in OURS:
                    made, seconds, spent = ours(method, private, columns, epsilon)
                    found.append({"set": name, "method": method, "epsilon": epsilon, "seed": seed, "spent": spent,
                                  "seconds": seconds, **judged(made, private, held_out, columns)})  # fmt: skip
                    print(json.dumps(found[-1]), flush=True)
                for kind in given.kinds if given.peer else ():
                    made, seconds = peer(given.peer, kind, private, columns, epsilon, seed)
                    row = {"set": name, "method": f"dpmm {kind}", "epsilon": epsilon, "seed": seed}
                    if made is None:
                        found.append({**row, "error": seconds})
                    else:
                        found.append({**row, "seconds": seconds, **judged(made, private, held_out, columns)})
                    print(json.dumps(found[-1]), flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))
    print(table(found))


def table(found: list[dict[str, Any]]) -> str:
    """Means over seeds, as Markdown."""
    lines = ["| table | epsilon | method | accuracy | two-way error | seconds |", "|---|---|---|---|---|---|"]
    for key in dict.fromkeys((row["set"], row["epsilon"], row["method"]) for row in found):
        same = [row for row in found if (row["set"], row["epsilon"], row["method"]) == key and "error" not in row]
        if not same:
            lines.append(f"| {key[0]} | {key[1]:g} | {key[2]} | failed | | |")
            continue
        accuracy = [100 * row["accuracy"] for row in same]
        spread = f" ± {np.std(accuracy, ddof=1):.1f}" if len(same) > 1 else ""
        seconds = np.mean([row.get("seconds", 0.0) for row in same])
        at = "-" if key[1] is None else f"{key[1]:g}"
        lines.append(
            f"| {key[0]} | {at} | {key[2]} | {np.mean(accuracy):.1f}{spread} | "
            f"{np.mean([row['pair_error'] for row in same]):.3f} | {seconds:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
