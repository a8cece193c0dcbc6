"""Are features functions of one image alone, computed once, and what they are called?"""

import json
import zlib

import numpy as np
import pytest
import torch
from torch import nn

from vestige import tasks
from vestige.tasks import models
from vestige.tasks.features import encoders
from vestige.tasks.features.cache import cached
from vestige.tasks.features.encoders import encoded, identity_of
from vestige.tasks.features.scattering_transform import Scattering
from vestige.tasks.features.starting_weights import Prior, body, read, start_from
from vestige.training.job import Job, start


def test_scattering_coefficients_are_those_of_kymatio():
    """Nine coefficients of `kymatio.Scattering2D(J=2, shape=(32, 32))` 0.3.0, whose pi is 3.1415."""
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    found = Scattering(32, 32)(torch.sin(rows * columns / 9) + torch.cos(rows / 3))
    assert found.shape == (81, 8, 8)
    printed = {0: -0.567156, 1: 0.035497, 6: 0.039599, 8: 0.001017, 9: 0.028134, 16: 0.000149, 17: 0.004351}
    printed |= {40: 0.005374, 80: 0.000372}
    for channel, value in printed.items():
        assert float(found[channel, 3, 5]) == pytest.approx(value, rel=2e-4, abs=1e-6), channel


def test_scattering_of_nothing_is_nothing_and_images_do_not_mix():
    scattering = Scattering(28, 28)
    flat = scattering(torch.full((1, 28, 28), 0.7))[0]
    assert flat[0].mean() == pytest.approx(0.7, abs=1e-3)
    assert flat[1:].abs().max() < 1e-5
    images = torch.randn(5, 3, 28, 28)
    assert torch.allclose(scattering(images)[2, 1], scattering(images[2, 1]), atol=1e-6)
    with pytest.raises(ValueError, match="height=30: scattering needs a multiple of 4"):
        Scattering(30, 28)


def prior(folder, seed=0, channels=3):
    torch.manual_seed(seed)
    model = models.network("wrn10-1", (channels, 16, 16), 2)
    made = Prior("wrn10-1", channels, body(model), {"made_of": "initial weights"})
    made.save(folder / f"prior-{seed}.pt")
    return folder / f"prior-{seed}.pt", model


def test_a_priors_features_are_the_inputs_of_its_networks_head_and_are_computed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("VESTIGE_CACHE", str(tmp_path / "cache"))
    path, model = prior(tmp_path)
    images = torch.randn(7, 3, 16, 16)
    found = encoded(images, path)
    headless = nn.Sequential(*list(model)[:-1]).eval()
    with torch.no_grad():
        assert torch.allclose(found, headless(images).flatten(1), atol=1e-5)
    monkeypatch.setattr(encoders, "_from_prior", None)
    assert torch.equal(encoded(images, path), found)
    other, _ = prior(tmp_path, seed=1)
    with pytest.raises(TypeError):  # another checkpoint is other features
        encoded(images, other)
    with pytest.raises(TypeError):  # and so are other images
        encoded(images + 1, path)


def test_a_hugging_face_folder_is_an_encoder(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("VESTIGE_CACHE", str(tmp_path / "cache"))
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_channels=3, **sizes)
    model = transformers.ViTModel(config).eval()
    folder = tmp_path / "vit"
    model.save_pretrained(folder)
    scaling = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
    (folder / "preprocessor_config.json").write_text(json.dumps(scaling))
    images = torch.rand(3, 3, 16, 16) * 2 - 1
    mean, deviation = (torch.tensor(scaling[key])[:, None, None] for key in ("image_mean", "image_std"))
    with torch.no_grad():
        wanted = model(pixel_values=(images / 2 + 0.5 - mean) / deviation).pooler_output
    assert torch.allclose(encoded(images, folder), wanted, atol=1e-5)
    assert encoded(images[:, :1], folder).shape == (3, 16)  # grey images are shown as colour ones
    before = identity_of(folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert identity_of(folder) != before


def test_a_checkpoint_that_is_none_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for path, words in ((tmp_path / "nowhere", "no such file or folder"), (tmp_path / "empty", "holds no weights")):
        with pytest.raises(ValueError, match=words):
            identity_of(path)
    (tmp_path / "file.pt").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="features=.*is no encoder: give a file of `vestige prior make`"):
        identity_of(tmp_path / "file.pt")
    np.savez(tmp_path / "a.npz", x=np.zeros(1))
    torch.save({"format": "another"}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is no file of `vestige prior make`"):
        read(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="features=None: task 'cifar10-features'"):
        tasks.check("cifar10-features", tmp_path)
    with pytest.raises(ValueError, match=r"is for the tasks \*-features"):
        tasks.check("digits-mlp", None, tmp_path)


def test_a_prior_leaves_the_head_as_it_is_and_fits_its_own_network_only(tmp_path):
    path, _ = prior(tmp_path)
    found = read(path)
    assert found.statement == {"made_of": "initial weights"}
    torch.manual_seed(5)
    model = models.network("wrn10-1", (3, 16, 16), 4)
    head = model[-1].weight.detach().clone()
    start_from(model, found)
    assert torch.equal(model[-1].weight, head)
    assert all(torch.equal(value, found.weights[name]) for name, value in body(model).items())
    assert Prior("wrn10-1", 3, body(model), {}).content == found.content
    with pytest.raises(ValueError, match="not in both"):
        start_from(models.network("cnn", (3, 16, 16), 4), found)
    with pytest.raises(ValueError, match="in the prior, which is one for wrn10-1 on 3 channels"):
        start_from(models.network("wrn10-1", (1, 16, 16), 4), found)


def test_a_bag_of_words_is_a_sum_of_signed_hashes_of_norm_one():
    bag = tasks.bag_of_words("Good, good film<br />truly", 64)
    wanted = torch.zeros(64)
    for word in ("good", "film", "truly"):  # each once, however often it stands there
        hashed = zlib.crc32(word.encode())
        wanted[(hashed >> 1) % 64] += -1.0 if hashed & 1 else 1.0
    assert torch.equal(bag, wanted / wanted.norm())
    assert torch.equal(tasks.bag_of_words("", 8), torch.zeros(8))
    with pytest.raises(ValueError, match="size=0"):
        tasks.bag_of_words("a", 0)


@pytest.mark.parametrize("damage", [b"", b"garbage", "half", "short"])
def test_features_that_were_damaged_are_computed_again(tmp_path, monkeypatch, caplog, damage):
    monkeypatch.setenv("VESTIGE_CACHE", str(tmp_path / "cache"))
    images, asked = torch.rand(6, 1, 4, 4), []

    def compute(part):
        asked.append(len(part))
        return part.flatten(1)

    first = cached(images, "test", "how", compute).clone()
    (file,) = (tmp_path / "cache").glob("*.npy")
    if damage == "short":
        np.save(file, np.zeros((5, 16), dtype=np.float32))
    else:
        file.write_bytes(file.read_bytes()[:-40] if damage == "half" else damage)
    assert torch.equal(cached(images, "test", "how", compute), first)
    assert asked == [6, 6]
    assert file.stem not in caplog.text  # a hash of the images
    assert "computing test features" in caplog.text
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(ValueError, match="can be written by anybody"):
        cached(images, "test", "how", compute)


def test_a_run_goes_on_with_its_own_encoder_only(tmp_path, monkeypatch):
    monkeypatch.setenv("VESTIGE_CACHE", str(tmp_path / "cache"))
    path, _ = prior(tmp_path)
    other, _ = prior(tmp_path, seed=1)
    images, labels = torch.randn(40, 3, 16, 16), torch.randint(2, (40,))

    def begun(checkpoint, **more):
        rows = encoded(images, checkpoint), labels
        torch.manual_seed(0)
        task = tasks.Task(
            "mine", nn.Linear(rows[0].shape[1], 2), nn.functional.cross_entropy, rows, (rows[0] + 1, labels), 2, ""
        )
        job = Job(
            task="mine", method="dp-sgd", features=str(checkpoint), epsilon=8.0, delta=1e-3, steps=4, sample_rate=0.5
        )
        return start(job, tmp_path / "run", task=task, **more)[1]

    training = begun(path)
    next(iter(training))
    training.ledger.close()
    with pytest.raises(ValueError, match="is another encoder than the one that this run began with"):
        begun(other, resume=True)
    assert len(list(begun(path, resume=True))) > 0
