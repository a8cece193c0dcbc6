"""Do selective methods work from the command line, as a user would call them?"""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from vestige.accounting import ledger
from vestige.cli import main
from vestige.priced_questions import Gaussian, Trial

RATES = ["--sample-rate", 1024 / 60000, "--validation-rate", 256 / 60000]
PRINTED = [
    "account",
    "--method",
    "dpsur",
    "--trials",
    2914,
    "--sigma-t",
    3,
    "--sigma-v",
    1.37,
    "--threshold",
    -1.5,
    *RATES,
]
SCATTERED = ["train", "--task", "mnist-hf-linear", "--sigma-t", 3, "--sample-rate", 0.05, "--lr", 0.5, "--json"]


def call(*words):
    return CliRunner().invoke(main.app, [str(word) for word in words])


def result_of(*words):
    made = call(*words)
    assert made.exit_code == 0, made.output
    return json.loads(made.stdout.splitlines()[-1])


def refusal(*words):
    made = call(*words)
    assert made.exit_code == 2, made.output
    return made.stderr


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Two classes of stripes, 200 to train on, and others that may be called public."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)

    def part(count):
        labels = generator.integers(0, 2, count)
        stripes = np.where(np.arange(28) % 4 < 2, 200, 20)
        pictures = np.stack([np.tile(stripes, (28, 1)).T if label else np.tile(stripes, (28, 1)) for label in labels])
        return (pictures + generator.integers(0, 50, pictures.shape)).astype(np.uint8), labels

    for name in ("private", "public"):
        (x_train, y_train), (x_test, y_test) = part(200), part(40)
        np.savez(folder / f"{name}.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESTIGE_CACHE", str(folder / "cache"))
        yield folder


@pytest.mark.parametrize(("by", "epsilon"), [("trial-level", 1.047), ("every-trial", 1.445), ("published", None)])
def test_a_run_is_priced_in_three_ways(by, epsilon):
    priced = result_of(*PRINTED, "--accepted", 1246, "--accounting", by, "--json")
    assert priced["published_claim_epsilon"] == pytest.approx(1.0, abs=0.001)
    assert priced.get("epsilon") == (None if epsilon is None else pytest.approx(epsilon, abs=0.003))
    assert "epsilon" in priced or by == "published"


def test_the_published_claim_needs_the_accepted_and_is_called_refuted():
    assert refusal(*PRINTED, "--accounting", "published").startswith("vestige: --accepted is missing: ")
    shown = call(*PRINTED, "--accepted", 1246, "--accounting", "published").output
    assert "refuted, not a guarantee" in shown
    assert not shown.startswith("epsilon")


@pytest.mark.slow
def test_every_option_of_buffered_rejection(images, tmp_path):
    gate = [
        "--sigma-v",
        3,
        "--clip-loss",
        0.001,
        "--threshold",
        -1.5,
        "--buffer",
        2,
        "--theta-k",
        1,
        "--max-rejects",
        5,
    ]
    decay = ["--decay-fast", 0.99, "--decay-slow", 0.999, "--progress-threshold", 0.005, "--progress", "noisy-loss"]
    words = [*SCATTERED, "--method", "dpsgd-br", "--epsilon", 1, "--validation-batch", 4, "--accounting", "trial-level"]
    found = result_of(*words, "--data", images / "private.npz", *gate, *decay, "--steps", 25, "--out", tmp_path / "run")
    assert found["trials"] == found["accepted"] + found["rejected"] == 25
    assert found["accountant"] == "renyi filter"
    assert found["epsilon"] == 1.0
    assert found["published_claim_epsilon"] < found["epsilon"]
    assert "degraded" in found
    assert call("verify", tmp_path / "run").exit_code == 0


@pytest.mark.slow
def test_public_examples_steer_and_their_absence_is_named(images, tmp_path):
    words = [*SCATTERED, "--method", "dpsgd-br", "--epsilon", 1, "--validation-batch", 4, "--sigma-v", 3, "--steps", 12]
    words += ["--data", images / "private.npz"]
    found = result_of(*words, "--progress", f"public:{images / 'public.npz'}", "--out", tmp_path / "run")
    asked = ledger.read(tmp_path / "run" / "ledger.jsonl").asks
    assert {type(question) for question in asked} == {Trial}, "looking at public examples is no question"
    assert found["epsilon"] == 1.0
    assert "is the task's own data" in refusal(*words, "--progress", f"public:{images / 'private.npz'}")
    absent = refusal(*words, "--progress", f"public:{images / 'nothing.npz'}")
    assert absent.startswith("vestige: --progress='public:")
    assert "no such file" in absent


@pytest.mark.slow
def test_private_moments_are_two_questions_before_the_first_step(images, tmp_path):
    words = [*SCATTERED, "--method", "dpsur", "--epsilon", 2, "--validation-batch", 4, "--sigma-v", 3, "--steps", 6]
    words += ["--data", images / "private.npz"]
    plain = result_of(*words)
    found = result_of(*words, "--normalise", "private", "--out", tmp_path / "run")
    asked = ledger.read(tmp_path / "run" / "ledger.jsonl").paid
    assert [asked[-1, 0], asked[-1, 1]] == [Gaussian(8.0)] * 2
    assert all(isinstance(question, Trial) for (step, _), question in asked.items() if step >= 0)
    assert found["asked"] == plain["asked"] + 2 == 8
    assert found["epsilon"] > plain["epsilon"]
    assert call("verify", tmp_path / "run").exit_code == 0
