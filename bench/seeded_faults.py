"""Do the everyday tests catch the faults that a privacy reviewer fears? Each is put into a copy of the source.

    python bench/seeded_faults.py                       # all of them: minutes
    python bench/seeded_faults.py --only "half the deviation" --only softmax
    python bench/seeded_faults.py --list

The faults are in tests/seeded_faults.toml: a small replacement in one file each, and everyday tests that must fail with
it. A test that fails without any fault, is slow, or does not exist catches nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "seeded_faults.toml"
PYTEST = ("-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "not slow", "--timeout", "120", "--tb", "line")
PASSED, FAILED = 0, 1
"""What pytest exits with; any other number means that the tests did not run."""


@dataclass(frozen=True)
class Fault:
    """One replacement in the source, and the everyday tests that must not pass with it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def applied(self, text: str) -> str:
        """The text of its file with the fault in it. Raises ValueError where there is not exactly one place for it."""
        count = text.count(self.old)
        if count != 1 or self.new == self.old:
            raise ValueError(f"the old text is {count} times in src/vestige/{self.file}, not once: follow the change")
        return text.replace(self.old, self.new)


def faults(path: Path = TABLE) -> list[Fault]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    return [Fault(row["name"], row["file"], row["old"], row["new"], tuple(row["tests"])) for row in rows]


def run(tests: Sequence[str], fault: Fault | None = None) -> tuple[int, str]:
    """Run tests on a copy of the source with a fault in it, or without: pytest's exit code, and its last line."""
    with tempfile.TemporaryDirectory(prefix="seeded-fault-") as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        if fault is not None:
            place = source / "vestige" / fault.file
            place.write_text(fault.applied(place.read_text(encoding="utf-8")), encoding="utf-8")
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(source)}
        done = subprocess.run(
            [sys.executable, *PYTEST, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    return done.returncode, lines[-1] if lines else ""


def verdict(fault: Fault) -> str:
    try:
        code, last = run(fault.tests, fault)
    except (OSError, ValueError) as problem:
        return f"does not apply ({problem})"
    if code == FAILED:
        return "caught"
    return "NOT CAUGHT" if code == PASSED else f"tests do not run ({last})"


def chosen(wanted: Sequence[str] | None) -> list[Fault]:
    found = [each for each in faults() if wanted is None or any(part in each.name for part in wanted)]
    if not found:
        raise SystemExit(f"--only {wanted}: no fault has such a name; see --list")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="faults whose names contain this; may be repeated"
    )
    parser.add_argument("--list", action="store_true", help="the faults and their tests, without running anything")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults that are tried at a time (default 1)")
    options = parser.parse_args()
    wanted = chosen(options.only)
    if options.list:
        for fault in wanted:
            print(f"{fault.name}\n    {fault.file}: {' '.join(fault.tests)}")
        return 0
    start = time.perf_counter()
    code, last = run(sorted({test for fault in wanted for test in fault.tests}))
    if code != PASSED:
        print(f"without any fault the tests do not pass, so they show nothing: {last}")
        return 2
    print(f"without a fault: {last}", flush=True)
    found = []
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        for fault, said in zip(wanted, pool.map(verdict, wanted), strict=True):
            found.append(said)
            print(f"{said}: {fault.name}" + ("" if said == "caught" else f" [{fault.file}]"), flush=True)
    caught = found.count("caught")
    print(f"{caught} of {len(wanted)} faults are caught by the everyday tests ({time.perf_counter() - start:.0f} s)")
    return int(caught < len(wanted))


if __name__ == "__main__":
    sys.exit(main())
