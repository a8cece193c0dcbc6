"""Do the examples of bridges to other libraries run, and ask exactly what their budget was planned for?"""

import copy
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import vestige
from conftest import clip_and_sum
from loops import flat
from vestige import accounting

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.filterwarnings("ignore")


def ran(name, *needed):
    """What an example has left, and its model."""
    for package in needed:
        pytest.importorskip(package)
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def same_as_planned(ledger, promise, steps, epsilon):
    """As many questions as steps, all alike, and the epsilon that any loop with these settings has."""
    ((question, asked),) = ledger.spent.items()
    assert asked == steps
    assert promise.epsilon == pytest.approx(
        accounting.guarantee({question: steps}, promise.delta, accounting.Facts(coordinates=10)).epsilon, rel=1e-3
    )
    assert 0.99 * epsilon < promise.epsilon <= epsilon


@pytest.mark.slow
def test_a_loop_under_accelerate(capsys):
    left = ran("accelerate_loop", "accelerate")
    engine = left["engine"]
    same_as_planned(engine._ledger, engine.guarantee(1e-5), 10 * 10, 3.0)
    assert "epsilon 3.00" in capsys.readouterr().out
    assert left["accuracy"] > 0.7


@pytest.mark.slow
def test_a_lightning_module(capsys):
    left = ran("lightning_fit", "lightning")
    private = left["private"]
    same_as_planned(private.engine._ledger, private.guarantee(), 10 * 10, 3.0)
    assert "epsilon 3.00" in capsys.readouterr().out
    assert left["trainer"].callback_metrics["accuracy"] > 0.7


@pytest.mark.slow
def test_a_loop_with_a_model_that_computes_its_loss(capsys):
    left = ran("hf_loop", "transformers")
    engine = left["engine"]
    same_as_planned(engine._ledger, engine.guarantee(1e-4), 3 * 10, 8.0)
    assert "epsilon 8.00" in capsys.readouterr().out


def test_a_dataset_of_hugging_face(capsys):
    left = ran("train_hf_dataset", "transformers", "datasets")
    training = left["training"]
    same_as_planned(training.ledger, training.guarantee(), 20, 8.0)
    assert "epsilon 8.00" in capsys.readouterr().out
    one_step_is_the_clipped_sum(left["model"], left["dataset"].select(range(12)))


def one_step_is_the_clipped_sum(model, dataset):
    """All examples, hardly any noise, plain SGD: against one example at a time in float64."""
    rows, twin = [], copy.deepcopy(model).double().eval()
    for row in dataset:
        twin.zero_grad()
        twin(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]])).loss.backward()
        rows.append(np.concatenate([p.grad.numpy().ravel() for p in twin.parameters()]))
    before = flat(model)
    training = vestige.train(
        model.eval(), torch.nn.functional.cross_entropy, dataset, method=vestige.make_method("dp-sgd", max_grad_norm=0.5),
        noise_multiplier=1e-9, delta=1e-3, sample_rate=1.0, steps=1, lr=1.0, reproducible=0,
    )  # fmt: skip
    list(training)
    moved = (before - flat(model)).double().numpy() * len(dataset)
    np.testing.assert_allclose(moved, clip_and_sum(np.stack(rows), 0.5), rtol=2e-3, atol=5e-5)
