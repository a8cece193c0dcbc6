"""How large and how readable is the source? Figures of this checkout, beside those of an earlier commit.

    python bench/code_figures.py                        # this checkout
    python bench/code_figures.py --before 8e1ac1b       # and that commit
    python bench/code_figures.py --strained             # the docstrings and comments that STRAINED finds

`Any` is counted in code, not in docstrings and comments. The length of a function is its lines from `def` to its end,
without its docstring. The functions of a step are those of vestige that run in the third step of a small private loop.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STRAINED = re.compile(
    r"\b(nobody|somebody|anybody|whoever|hears?|heard|speaks?|says? so|(?:is|be|are|was) said|in vain|no say|one's own|"
    r"(?:goes|went|go) (?:on|another|with|where|the same way|by)|(?:is|are) gone|lets? go|at hand|at work|as ever|"
    r"nothing but|stands? (?:in|at|by|behind|beside|before|there|still)|stood|lies? (?:with|there|beside|where|here)|"
    r"where [^.:;,]* lies?(?=[ .,;:]|$)|tells? (?!.{0,30}apart)|told(?! apart)|beside it)\b",
    re.IGNORECASE,
)
"""Words where an ordinary noun or verb of the field belongs: `lies` for is stored, `told` for is passed, `nobody`."""
STEP = """
import json, sys, torch
from torch.utils.data import DataLoader, TensorDataset
import vestige
model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(400, 20), torch.randint(2, (400,))), batch_size=40)
model, optimizer, loader = vestige.PrivacyEngine().make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)
seen, calls = set(), 0
def watch(frame, event, argument):
    global calls
    code = frame.f_code
    if event == "call" and "/vestige/" in code.co_filename:
        seen.add((code.co_filename, code.co_firstlineno)), (calls := calls + 1)
batches = iter(loader)
for step in range(3):
    if step == 2:
        sys.setprofile(watch)
    x, y = next(batches)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
sys.setprofile(None)
print(json.dumps([len(seen), len({file for file, _ in seen}), calls]))
"""


def sources(root: Path) -> list[Path]:
    return sorted((root / "src" / "vestige").rglob("*.py"))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a file, with their lines. Lines of comments that follow each other are one."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    begun, last, words = 0, -1, ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        written = token.string.lstrip("# ")
        if token.type != tokenize.COMMENT or written.startswith(("type:", "noqa", "fmt:", "---")):
            continue
        line = token.start[0]
        if words and line != last + 1:
            yield begun, words
            words = ""
        begun, words, last = (begun if words else line), f"{words} {written}".strip(), line
    if words:
        yield begun, words


def functions(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """The lines and the number of parameters of each function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            text = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            yield (node.end_lineno or 0) - node.lineno + 1 - text, count


def measured(root: Path) -> dict[str, float | int]:
    files = sources(root)
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files)
    each = [found for tree in trees for found in functions(tree)]
    any_ = sum(isinstance(node, ast.Name) and node.id == "Any" for tree in trees for node in ast.walk(tree))
    written = [words for path in files for _, words in prose(path)]
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    step = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, check=True)
    in_step, files_in_step, calls = json.loads(step.stdout.splitlines()[-1])
    return {
        "lines": lines,
        "files": len(files),
        "functions": len(each),
        "median lines of a function": statistics.median(length for length, _ in each),
        "functions of over 60 lines": sum(length > 60 for length, _ in each),
        "most parameters of a function": max(count for _, count in each),
        "Any per thousand lines": round(1000 * any_ / lines, 1),
        "docstrings and comments": len(written),
        "of them strained, percent": round(100 * sum(bool(STRAINED.search(w)) for w in written) / len(written), 1),
        "lines of the README": len((root / "README.md").read_text(encoding="utf-8").splitlines()),
        "functions of a step": in_step,
        "files of a step": files_in_step,
        "calls of a step": calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="COMMIT", help="measure this commit, too")
    parser.add_argument("--strained", action="store_true", help="list what the regular expression finds")
    arguments = parser.parse_args()
    if arguments.strained:
        for path in sources(ROOT):
            for line, words in prose(path):
                if found := STRAINED.search(words):
                    print(f"{path.relative_to(ROOT)}:{line}: [{found[0]}] {' '.join(words.split())}")
        return
    columns = {"now": measured(ROOT)}
    if arguments.before:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(["git", "archive", arguments.before], cwd=ROOT, capture_output=True, check=True)
            subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
            columns = {arguments.before: measured(Path(folder)), **columns}
    print(f"| | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for name in columns["now"]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns.values())} |")


if __name__ == "__main__":
    main()
