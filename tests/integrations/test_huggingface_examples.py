"""Do the examples of fine-tuning run, and does what they leave verify?"""

import re
import runpy
import sys
from pathlib import Path

import pytest

from vestige.training.verify import verify

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def ran(monkeypatch, capsys):
    def ran(name, *arguments):
        """What an example prints; in this process, where the packages are loaded already."""
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return ran


def test_the_classifier(tmp_path, ran):
    options = (
        "--target_epsilon 3 --target_delta 1e-4 --lr auto --max_steps 8 --per_device_train_batch_size 50 --use_cpu"
    )
    out = ran("trainer.py", "--output_dir", str(tmp_path), *options.split(), "--report_to", "none")
    assert 2.9 < float(re.search(r"at epsilon ([\d.]+)", out).group(1)) <= 3
    assert verify(tmp_path).asked == 8


@pytest.mark.slow
def test_the_adapter(tmp_path, ran):
    pytest.importorskip("peft")
    out = ran("causal_lm_lora.py", str(tmp_path))
    assert 2.9 < float(re.search(r"verified: epsilon ([\d.]+)", out).group(1)) <= 3
    assert {"adapter_model.safetensors", "privacy.json"}.isdisjoint(verify(tmp_path).unchecked)
