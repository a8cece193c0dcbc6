"""Do several processes of one run charge the book of their dataset once, and stop together where it ends?"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from process_gang import Failed, charged, charged_loop, data
from vestige.budget import Book, terms
from vestige.budget.identity import RowSet, fingerprint, hashes_of, make_key
from vestige.budget.spending import rows_file
from vestige.budget.verify import verify
from vestige.priced_questions import SampledGaussian

STEP = SampledGaussian(0.25, 1.0)


@pytest.fixture
def book(tmp_path):
    key = make_key(tmp_path / "key")
    rows = RowSet.of(hashes_of(data(), key))
    rows.write(rows_file(tmp_path / "book"))
    told = {"rows": 60, "root": rows.root, "key": fingerprint(key), "key_file": str(tmp_path / "key")}
    return Book.create(tmp_path / "book", terms(20.0, 1e-5, data=told))


def runs(book):
    return list(Book(book.path, whole=True).state.reservations.values())


def test_a_run_of_two_processes_is_charged_once_and_goes_on(two, book, tmp_path):
    found = two(charged, str(book.path), out=str(tmp_path / "run"), steps=8, stop=4)
    assert not [each for each in found if isinstance(each, Failed)], found
    [held] = runs(book)
    assert (held.plan, held.asked, held.charged) == (Counter({STEP: 8}), None, Counter({STEP: 5}))
    found = two(charged, str(book.path), out=str(tmp_path / "run"), steps=8, resume=True)
    assert not [each for each in found if isinstance(each, Failed)], found
    [held] = runs(book)
    assert held.why == "finished"
    assert 8 <= held.asked[STEP] <= 9
    assert verify(book.path, [tmp_path / "run"]).runs == 1


def test_a_loop_of_two_processes_is_charged_once_and_a_refusal_reaches_both(two, book, tmp_path):
    found = two(charged_loop, str(book.path))
    assert not [each for each in found if isinstance(each, Failed)], found
    [held] = runs(book)
    assert held.charged[SampledGaussian(0.2, 1.0)] == len(found[0]["path"])
    small = Book.create(tmp_path / "small", terms(0.2, 1e-5))
    found = two(charged, str(small.path), out=str(tmp_path / "refused"))
    assert "does not hold this run" in repr(found[0]), found
    assert all(isinstance(each, Failed) for each in found)
    assert not runs(small)
    assert not (tmp_path / "refused").exists()


@pytest.mark.slow
def test_torchrun_charges_one_run(tmp_path):
    environment = {**os.environ, "VESTIGE_PERSON": "ann", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2] / "src")
    command = [sys.executable, "-m", "vestige"]

    def run(words, **more):
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, **more)

    opened = run([*command, "budget", "open", "b", "--task", "digits-mlp", "--epsilon", "3", "--delta", "1e-5"])
    assert opened.returncode == 0, opened.stderr
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "vestige"]
    train = ["train", "--task", "digits-mlp", "--noise-multiplier", "2", "--sample-rate", "0.05", "--steps", "10"]
    made = run([*torchrun, *train, "--budget", "b", "--out", "run"])
    assert made.returncode == 0, made.stderr
    found = json.loads(run([*command, "budget", "show", "b", "--json"]).stdout)
    assert [(each["counted"], each["person"], each["state"]) for each in found["runs"]] == [(10, "ann", "finished")]
    assert run([*command, "budget", "verify", "b", "run"]).returncode == 0
    refused = run([*torchrun, *train[:-1], "100000", "--budget", "b", "--out", "run2"])
    assert refused.returncode != 0
    assert refused.stderr.count("the budget of b does not hold this run") == 1
    assert "[rank1]: Traceback" not in refused.stderr
    assert not (tmp_path / "run2").exists()
