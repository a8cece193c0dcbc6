"""Do paths, their plane and the loss around them agree with what was trained?"""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from vestige import tasks
from vestige.cli.main import app
from vestige.compare import dpsgd_br_figure1


def test_the_plane_holds_paths_that_lie_in_one_and_the_loss_is_that_of_the_weights(monkeypatch):
    monkeypatch.setattr(dpsgd_br_figure1, "GRID", 3)
    task = tasks.load("digits-mlp", None, 0)
    start = torch.cat([p.detach().flatten() for p in task.model.parameters()]).double().numpy()
    rng = np.random.default_rng(0)
    one, other = np.linalg.qr(rng.normal(size=(len(start), 2)))[0].T
    paths = {"dp-sgd": start + np.outer(np.arange(5), one), "dpsgd-br": start + np.outer(np.arange(4), other)}
    centre, axes = dpsgd_br_figure1.plane(paths)
    np.testing.assert_allclose(axes @ axes.T, np.eye(2), atol=1e-9)
    for path in paths.values():
        flat = (path - centre) @ axes.T
        np.testing.assert_allclose(centre + flat @ axes, path, atol=1e-9)
    picture = dpsgd_br_figure1.drawn(paths)
    assert np.array(picture["loss"]).shape == (3, 3)
    middle = centre + picture["x"][1] * axes[0] + picture["y"][1] * axes[1]
    torch.nn.utils.vector_to_parameters(torch.from_numpy(middle).float(), task.model.parameters())
    expected = torch.nn.functional.cross_entropy(task.model(task.test[0]), task.test[1]).item()
    assert picture["loss"][1][1] == pytest.approx(expected, rel=1e-5)
    assert dpsgd_br_figure1.svg(picture).count("<polyline") == 2


def test_differences_are_paired_by_seed():
    rows = [
        {
            "label": label,
            "seed": seed,
            "winding": 4.0 + seed - drop,
            "windings": [2.0 + 0.5 * k - drop for k in range(count)],
            "loss": 1.0 + seed - drop,
            "updates": count,
            "losses": [3.0 - k * 0.5 - drop for k in range(count)],
        }
        for label, drop, count in (("dp-sgd", 0.0, 4), ("dpsur", 0.5, 3), ("dpsgd-br", 1.0, 2))
        for seed in range(3)
    ]
    found = {(each["label"], each["quantity"]): each["difference"] for each in dpsgd_br_figure1.compared(rows)}
    assert found[("dpsgd-br", "loss")] == pytest.approx(-1.0)
    assert found[("dpsur", "winding")] == pytest.approx(-0.5)
    assert found[("dpsgd-br", "winding after as many updates")] == pytest.approx(-1.0)
    assert found[("dpsgd-br", "loss after as many updates")] == pytest.approx(-1.0)  # not against DP-SGD's fourth


@pytest.mark.slow
def test_the_command_goes_on_where_it_was(tmp_path):
    words = ["reproduce", "br-fig1", "--small", "--seeds", "1", "--out", str(tmp_path), "--json"]
    first = json.loads(CliRunner().invoke(app, words).stdout)
    assert {row["label"] for row in first["rows"]} == set(dpsgd_br_figure1.LABELS)
    assert all(row["winding"] is None or row["winding"] >= 1 for row in first["rows"])
    assert (tmp_path / "paths.svg").read_text().count("<polyline") == 3
    again = json.loads(CliRunner().invoke(app, words).stdout)
    assert again["rows"] == first["rows"]
