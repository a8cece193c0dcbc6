"""Is the average its formula, and what is evaluated and kept?"""

import numpy as np
import pytest
import torch

from method_runs import flat, run
from vestige.methods.base import Method
from vestige.optim import averaging


@pytest.mark.parametrize("average", [averaging.ExponentialAverage(0.9), averaging.Polyak()])
def test_the_average_is_its_formula_and_is_what_is_evaluated_and_kept(average, tmp_path):
    method = Method(name="dp-sgd", average=average)
    training = run(method, steps=12, out=tmp_path / "run")
    mean, after = flat(training.model).double().numpy(), []
    for t, _ in enumerate(training):
        after.append(flat(training.model).double().numpy())
        decay = min(0.9, (1 + t) / (10 + t)) if isinstance(average, averaging.ExponentialAverage) else t / (t + 1)
        mean = decay * mean + (1 - decay) * after[-1]
    with training.averaged():
        np.testing.assert_allclose(flat(training.model), mean, rtol=1e-5, atol=1e-6)
    assert np.array_equal(flat(training.model).double().numpy(), after[-1])
    training.finish()
    kept = torch.load(tmp_path / "run" / "model.pt", weights_only=True)
    np.testing.assert_allclose(torch.cat([v.ravel() for v in kept.values()]), mean, rtol=1e-5, atol=1e-6)
