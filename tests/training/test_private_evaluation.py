"""Is a private evaluation one more question, planned, charged and answered with the noise that was said?"""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import vestige
from conftest import make_toy
from vestige.accounting.ledger import read
from vestige.accounting.odometers_and_filters import Budget, Reserving
from vestige.cli import main
from vestige.priced_questions import Gaussian, SampledGaussian
from vestige.training.verify import verify

LOSS = torch.nn.functional.cross_entropy
COMMON = {"delta": 1e-4, "sample_rate": 0.1, "steps": 6, "lr": 0.5, "method": "dp-sgd"}


def right(model, data):
    return int((model(data[0]).argmax(1) == data[1]).sum())


def test_the_count_is_that_of_the_final_model():
    model, data = make_toy(300)
    evaluation = vestige.PrivateEvaluation(error=1e-9)
    training = vestige.train(model, LOSS, data, noise_multiplier=1.0, evaluate=evaluation, reproducible=1, **COMMON)
    list(training)
    assert training.private_accuracy == pytest.approx(right(model, data) / 300, abs=1e-6)
    assert training.result().private_accuracy_error == 1e-9


def test_the_noise_is_as_said():
    answers = []
    for seed in range(40):
        model, data = make_toy(300)
        training = vestige.train(
            model,
            LOSS,
            data,
            noise_multiplier=9.0,
            evaluate=vestige.PrivateEvaluation(0.05),
            reproducible=seed,
            **{**COMMON, "steps": 1, "lr": 1e-9},
        )
        list(training)
        answers.append(training.private_accuracy - right(model, data) / 300)
    assert 0.035 < np.std(answers) < 0.07
    assert abs(np.mean(answers)) < 0.03


def test_it_is_planned_and_charged_once(tmp_path):
    model, data = make_toy(2000)
    training = vestige.train(model, LOSS, data, epsilon=2.0, evaluate="private", out=tmp_path / "run", **COMMON)
    list(training)
    asked = read(tmp_path / "run" / "ledger.jsonl").asks
    assert asked == {SampledGaussian(0.1, training.plan.noise_multiplier): 6, Gaussian(20.0): 1}
    assert training.guarantee().epsilon <= 2.0
    assert training.guarantee().epsilon > 1.99
    verdict = verify(tmp_path / "run")
    assert (verdict.asked, verdict.finished) == (7, True)
    assert verdict.guarantee.epsilon == pytest.approx(training.guarantee().epsilon)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["private_accuracy_error"] == 0.01
    assert 0 <= result["private_accuracy"] <= 1
    alone = vestige.train(make_toy(2000)[0], LOSS, data, epsilon=2.0, **COMMON)
    assert alone.plan.noise_multiplier < training.plan.noise_multiplier


def test_examples_that_were_held_out():
    model, data = make_toy(300)
    held_out = make_toy(500, seed=7)[1]
    evaluation = vestige.PrivateEvaluation(error=0.02, on=held_out)
    training = vestige.train(model, LOSS, data, noise_multiplier=1.0, evaluate=evaluation, **COMMON)
    list(training)
    assert training.ledger.spent[Gaussian(10.0)] == 1
    assert training.private_accuracy == pytest.approx(right(model, held_out) / 500, abs=0.12)


def test_an_interrupted_run_is_evaluated_when_it_ends(tmp_path):
    model, data = make_toy(2000)
    options = {"epsilon": 2.0, "evaluate": "private", "out": tmp_path / "run", **COMMON}
    training = vestige.train(model, LOSS, data, **options)
    for record in training:
        if record.step == 2:
            break
    training.ledger.close()
    assert training.private_accuracy is None
    again = vestige.train(make_toy(2000)[0], LOSS, data, resume=True, **options)
    list(again)
    assert again.ledger.spent[Gaussian(20.0)] == 1
    assert again.private_accuracy is not None
    assert again.guarantee().epsilon <= 2.0
    with pytest.raises(ValueError, match="resume: evaluate"):
        vestige.train(make_toy(2000)[0], LOSS, data, resume=True, **{**options, "evaluate": None})


def test_the_last_question_is_kept_back():
    """Steps beyond the plan, as of a run that was resumed, do not eat what the evaluation costs."""
    step, last = SampledGaussian(0.5, 3.0), Gaussian(6.0)
    budget = Reserving(Budget(3.0, 1e-4, {last: 1, step: 3}), last)
    spent = {}
    while budget.allows(spent, step):
        spent[step] = spent.get(step, 0) + 1
    assert spent[step] > 3
    assert budget.allows(spent, last)
    spent[last] = 1
    assert not budget.allows(spent, step)
    assert vestige.accounting.epsilon(spent, 1e-4) <= 3.0


def test_a_method_whose_steps_follow_from_answers():
    model, data = make_toy(3000)
    method = vestige.make_method("dpsgd-br")
    training = vestige.train(model, LOSS, data, epsilon=4.0, evaluate="private", **{**COMMON, "method": method})
    list(training)
    assert training.private_accuracy is not None
    assert training.guarantee().epsilon <= 4.0


def test_what_cannot_be_counted_is_refused():
    model, (x, y) = make_toy(300)
    for targets in (y.float(), y[:, None]):
        with pytest.raises(ValueError, match="counts right answers"):
            vestige.train(model, LOSS, (x, targets), noise_multiplier=1.0, evaluate="private", **COMMON)
    with pytest.raises(ValueError, match="evaluate='often'"):
        vestige.train(model, LOSS, (x, y), noise_multiplier=1.0, evaluate="often", **COMMON)
    with pytest.raises(ValueError, match="other columns"):
        named = vestige.PrivateEvaluation(on={"x": x, "labels": y})
        vestige.train(model, LOSS, (x, y), noise_multiplier=1.0, evaluate=named, **COMMON)


@pytest.mark.slow
def test_the_command(tmp_path):
    words = ["train", "--task", "digits-mlp", "--epsilon", "4", "--steps", "5", "--evaluate", "private", "--out"]
    made = CliRunner().invoke(main.app, [*words, str(tmp_path / "run")])
    assert made.exit_code == 0, made.output
    assert "± 1.0% of the training examples" in made.output
    assert "test accuracy" not in made.output
    checked = CliRunner().invoke(main.app, ["verify", str(tmp_path / "run"), "--json"])
    assert json.loads(checked.stdout)["asked"] == 6
    for flags in (
        ["--evaluate", "loudly"],
        ["--evaluate", "private", "--evaluate-every", "2"],
        ["--evaluate", "private", "--evaluate-error", "0"],
    ):
        refused = CliRunner().invoke(main.app, ["train", "--task", "digits-mlp", "--noise-multiplier", "1", *flags])
        assert refused.exit_code == 2 or refused.exception is not None


class LooksElsewhere(torch.nn.Module):
    """Right about every example; in evaluation, `change` decides what it is shown."""

    def __init__(self, change):
        super().__init__()
        self.head, self.change, self.greatest = torch.nn.Linear(6, 3), change, 0.0
        self.register_buffer("seen", torch.zeros(()))
        with torch.no_grad():
            self.head.weight.copy_(5 * torch.eye(6)[:3])
            self.head.bias.zero_()

    def forward(self, x):
        return self.head(x if self.training else self.change(self, x))


def by_a_sign_of_all(model, x):
    return x * x[:, 0].sum().sign()


def less_the_mean(model, x):
    return x - x.mean(0)


def by_what_was_greatest(model, x):
    model.greatest = max(model.greatest, float(x.max()))
    return -x if model.greatest > 100 else x


def less_what_is_kept(model, x):
    model.seen += x.sum()
    return x - model.seen


@pytest.mark.parametrize("change", [by_a_sign_of_all, less_the_mean, by_what_was_greatest, less_what_is_kept])
def test_one_example_changes_the_count_by_one_whatever_the_model_does(change):
    """Also where a model that is evaluated does what it does not do in training."""
    y = torch.randint(0, 3, (64,), generator=torch.Generator().manual_seed(1))
    found, assumed = [], set()
    for value in (1000.0, -1000.0):
        x = torch.nn.functional.one_hot(y, 6) + 0.1
        x[5, 0] = value
        model = LooksElsewhere(change)
        evaluation = vestige.PrivateEvaluation(error=1e-6)
        once = {**COMMON, "steps": 1, "sample_rate": 1.0, "lr": 1e-9}
        training = vestige.train(model, LOSS, (x, y), noise_multiplier=1e3, evaluate=evaluation, reproducible=5, **once)
        list(training)
        found.append(64 * training.private_accuracy)
        assumed |= {each.name for each in training.guarantee().assumptions if each.status == "assumed"}
        assert (model.seen, model.training) == (0, True)
    assert abs(found[0] - found[1]) < 1.01
    assert ("rows_apart" in assumed) is (change is by_what_was_greatest)
