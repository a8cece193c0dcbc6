"""Does what a new user types work, and does what cannot work say why?"""

import gc
import json
import sys
import warnings
from importlib import import_module
from types import SimpleNamespace
from typing import TypeVar, get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from commands import as_json
from commands import vestige as command
from other_models import exact
from vestige.accounting.guarantees import Facts, guarantee
from vestige.priced_questions import SampledGaussian
from vestige.training import loggers

X, Y = torch.randn(60, 3, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 2
PUBLIC = X + 1, Y
PLAN = {"noise_multiplier": 1.0, "delta": 1e-3, "lr": 0.5}


def network():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def trained(data=(X, Y), loss=F.cross_entropy, **options):
    """The weights of a run that can be repeated."""
    model = network()
    vestige.train(model, loss, data, **{**PLAN, "sample_rate": 0.2, "steps": 4, "reproducible": 3} | options).run()
    return model.weight.detach().clone()


def started(**options):
    given = {**PLAN, "batch_size": 12, "steps": 4} | options
    return vestige.train(network(), F.cross_entropy, (X, Y), **given)


# --- vestige.train takes what people type ----------------------------------------------------------------------------


def test_a_batch_size_is_a_rate_and_epochs_are_steps():
    training = started(batch_size=15, steps=None, epochs=3)
    assert (training.plan.sample_rate, training.plan.steps, training.expected_batch) == (0.25, 12, 15.0)
    assert torch.equal(trained(sample_rate=None, batch_size=12, steps=None, epochs=1), trained(steps=5))
    loader = DataLoader(TensorDataset(X, Y), batch_size=20)
    with pytest.warns(UserWarning, match="its batches are replaced"):
        training = vestige.train(network(), F.cross_entropy, loader, **PLAN, epochs=2)
    assert training.plan.steps == 6
    training.run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 12, "sample_rate": 0.2}, "batch_size=12 and sample_rate=0.2: give one"),
        ({"epochs": 1, "steps": 4}, "epochs=1 and steps=4: give one"),
        ({"batch_size": 61}, "batch_size=61 is more than the 60"),
        ({"batch_size": 0}, "batch_size=0 must be a whole number"),
        ({"epochs": 1.5, "steps": None}, "epochs=1.5 must be a whole number"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 must be positive"),
        ({"max_grad_norm": -1.0, "method": vestige.dp_sgd()}, "max_grad_norm=-1.0 must be positive"),
        ({"log_to": "board"}, "log_to='board' must be KIND:PLACE"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_a_mistake_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        started(**options)


def test_max_grad_norm_is_the_methods_own_bound():
    by_name = trained(max_grad_norm=0.1)
    assert torch.equal(by_name, trained(method=vestige.dp_sgd(), max_grad_norm=0.1))
    assert torch.equal(by_name, trained(method=vestige.dp_sgd(max_grad_norm=0.1)))
    assert not torch.equal(by_name, trained())


def test_the_model_is_moved_to_the_device_that_is_named():
    model = network().to("meta").to_empty(device="cpu")
    model.load_state_dict(network().state_dict())
    training = vestige.train(model, F.cross_entropy, (X, Y), **PLAN, batch_size=12, steps=1, device="cpu")
    assert training.run().steps == 1
    assert model.weight.device.type == "cpu"


def test_a_loss_may_be_a_class():
    assert torch.equal(trained(loss=nn.CrossEntropyLoss), trained(loss=nn.CrossEntropyLoss()))


def test_a_data_frame_is_its_columns_in_order():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X.numpy().astype(np.float64), columns=["a", "b", "c"])
    frame.insert(1, "label", Y.numpy().astype(np.int32))
    assert torch.equal(trained(frame), trained())
    frame["who"] = np.arange(60) // 2
    by_column = trained(frame.rename(columns={"label": "y"}), target="y", users="who", sample_rate=0.2)
    assert torch.equal(by_column, trained(users=np.arange(60) // 2))
    with pytest.raises(ValueError, match="target='z': say which column"):
        trained(frame, target="z")
    frame["a"] = "text"
    with pytest.raises(ValueError, match="column 'a' of the DataFrame holds no numbers"):
        trained(frame.drop(columns="who"))
    with pytest.raises(ValueError, match="say which column of the DataFrame"):
        trained(frame[["a", "b"]])


def weighted(outputs, label, weight):
    return (weight * F.cross_entropy(outputs, label, reduction="none")).mean()


def test_a_loss_may_see_more_than_one_target_such_as_a_rows_own_weight():
    """Against weights that are the same for a class, which torch's loss has by itself."""
    classes = torch.tensor([1.5, 0.5])
    weights = classes[Y]
    expected = trained(loss=nn.CrossEntropyLoss(weight=classes))
    rows = [(X[i], Y[i], weights[i]) for i in range(60)]
    columns = {"inputs": X, "label": Y, "weight": weights}

    class Named(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs)

    def by_name():
        torch.manual_seed(0)
        model = Named(3, 2)
        given = {**PLAN, "sample_rate": 0.2, "steps": 4, "reproducible": 3, "target": ["label", "weight"]}
        vestige.train(model, weighted, columns, **given).run()
        return model.weight.detach()

    for found in (trained((X, Y, weights), weighted, target=2), trained(rows, weighted, target=2), by_name()):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(trained((X, Y, weights), weighted, target=2, engine="reference"), expected)
    with pytest.raises(ValueError, match="torch's losses take one target, and a row has 2"):
        trained((X, Y, weights), F.cross_entropy, target=2)
    with pytest.raises(ValueError, match=r"must be a tuple \(inputs..., 3 targets\)"):
        trained((X, Y, weights), weighted, target=3)


def test_a_row_whose_label_the_loss_cannot_take_is_left_out_beside_a_weight():
    labels = Y.clone()
    labels[7] = 9
    kept = torch.ones(60)
    kept[7] = 0.0
    torch.testing.assert_close(
        trained((X, labels, torch.ones(60)), weighted, target=2), trained((X, Y, kept), weighted, target=2)
    )


def test_run_takes_all_steps_and_len_says_how_many():
    training = started(steps=3)
    assert len(training) == 3
    result = training.run()
    assert (result.steps, result.stopped, len(training)) == (3, "finished", 3)
    assert list(training) == []


def test_len_of_a_resumed_run_is_what_is_left(tmp_path):
    for _ in (training := started(out=tmp_path / "run")):
        break
    training.ledger.close()
    again = started(out=tmp_path / "run", resume=True)
    assert len(again) == 3
    assert len(list(again)) == 3


def _collected(make):
    make()
    gc.collect()


def test_a_training_that_is_never_iterated_is_warned_of():
    with pytest.warns(UserWarning, match="never iterated, so the model is untrained: call .run()"):
        _collected(started)
    with warnings.catch_warnings(record=True) as said:  # an error in a finalizer would be lost
        warnings.simplefilter("always")
        _collected(lambda: started(steps=1).run())
    assert not [each for each in said if "never iterated" in str(each.message)]


class Sink:
    NEEDS = ("json", "json")
    rows: tuple = ()

    def __init__(self, place, name):
        Sink.rows = []

    def log(self, step, values):
        Sink.rows.append((step, dict(values)))

    def close(self):
        Sink.rows.append("closed")


def test_log_to_logs_what_is_released(monkeypatch):
    monkeypatch.setitem(loggers.SINKS, "tensorboard", Sink)
    training = started(steps=2, log_to="tensorboard:here", epsilon=3, noise_multiplier=None)
    training.run()
    assert [row if row == "closed" else row[0] for row in Sink.rows] == [0, 1, "closed"]
    assert Sink.rows[0][1].keys() == {"epsilon"}


def test_records_are_json():
    for record in started(method="fo-dp-sgd", steps=2, epsilon=3, noise_multiplier=None):
        row = json.loads(json.dumps(dict(record)))
        assert row == record.to_json()
        assert row["step"] == record["step"] == record.step
    assert isinstance(row["effective_depth"], float)


def test_a_training_and_a_guarantee_are_readable():
    training = started(steps=2, epsilon=3, noise_multiplier=None)
    assert repr(training).startswith(
        "<Training by dp-sgd: step 0 of 2, epsilon 0 of 3 at delta 0.001, 60 rows, about 12"
    )
    training.run()
    found = training.guarantee()
    assert repr(found).startswith("<Guarantee: epsilon 2.99")
    assert "\n" not in repr(found) + repr(training)
    page = training._repr_html_()
    assert "epsilon 2.99" in page
    assert page.count("<tr>") == len(found.assumptions)
    seeded = guarantee({SampledGaussian(0.1, 1.0): 3}, 1e-5, Facts(noise="seeded", sampling="<b>"))
    assert "<b>" not in seeded._repr_html_().removeprefix("<p><b>")
    assert "no epsilon" in repr(seeded)


def test_early_stopping_reports_what_was_spent():
    training = started(steps=40, epsilon=3, noise_multiplier=None)
    for record in training:
        if record.step == 4:
            break
    result = training.result()
    assert (result.steps, result.stopped) == (5, "interrupted")
    assert (
        0.3 < result.statement.epsilon < 2 < started(steps=5, epsilon=3, noise_multiplier=None).run().statement.epsilon
    )
    assert training.guarantee().epsilon == result.statement.epsilon


# --- notebooks -------------------------------------------------------------------------------------------------------


def private(model, optimizer=None, data=(X, Y), **options):
    engine = vestige.PrivacyEngine()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*data), batch_size=12)
    given = {"noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    return engine, *engine.make_private(module=model, optimizer=optimizer, data_loader=loader, **given)


def steps(model, optimizer, loader):
    for inputs, labels in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


def test_a_cell_with_make_private_that_runs_again_is_refused_there():
    model = network()
    engine, _, optimizer, loader = private(model)
    with pytest.raises(ValueError, match="module was made private before, .* make the model and the optimizer anew"):
        private(model)
    with pytest.raises(ValueError, match="module: its part '0' was made private before"):
        private(nn.Sequential(model))
    steps(model, optimizer, loader)  # the refusals left the loop as it was
    assert engine.asked == 5
    other = network()
    for group in optimizer.param_groups:
        group["params"] = list(other.parameters())
    with pytest.raises(ValueError, match="optimizer was made private before"):
        private(other, optimizer)


class Interrupted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.stop = nn.Linear(3, 4), nn.Linear(4, 2), False

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.stop:
            self.stop = False
            raise KeyboardInterrupt
        return self.second(hidden)


def test_ctrl_c_inside_a_forward_is_recovered_from():
    model = Interrupted()
    engine, _, optimizer, loader = private(model)
    steps(model, optimizer, loader)
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        steps(model, optimizer, loader)
    before = engine.asked
    steps(model, optimizer, loader)
    assert (before, engine.asked) == (5, 10)


def test_ctrl_c_inside_a_step_of_train_is_recovered_from():
    model = Interrupted()
    training = vestige.train(model, F.cross_entropy, (X, Y), **PLAN, batch_size=12, steps=4)
    model.stop = True
    with pytest.raises(KeyboardInterrupt):
        training.run()
    assert training.run().steps == 4


# --- messages that misled --------------------------------------------------------------------------------------------


def test_python_is_told_how_to_resume_in_python(tmp_path):
    started(steps=1, out=tmp_path / "run").run()
    with pytest.raises(ValueError, match=r"already holds a run: choose another, or continue it: resume=True"):
        started(steps=1, out=tmp_path / "run")


def test_a_flattened_batch_is_told_to_be_padded():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(10, 4), nn.Linear(4, 2)

        def forward(self, tokens, offsets):
            return self.head(self.bag(tokens, offsets))

    def flattened(rows):
        offsets = torch.tensor([0, *(len(tokens) for tokens, _ in rows)][:-1]).cumsum(0)
        return torch.cat([tokens for tokens, _ in rows]), offsets, torch.stack([label for _, label in rows])

    rows = [(torch.arange(1 + i % 4), torch.tensor(i % 2)) for i in range(60)]
    engine, model = vestige.PrivacyEngine(), Bag()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(rows, batch_size=20, collate_fn=flattened)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    with pytest.raises(
        ValueError, match="flattened batch, as of graphs or of EmbeddingBag with offsets, make a padded"
    ):
        for tokens, offsets, _ in loader:
            model(tokens, offsets)


def test_spectral_norm_by_hooks_says_which_to_use_and_the_others_train():
    with pytest.raises(
        ValueError, match="spectral_norm computes its weight in a hook .* torch.nn.utils.parametrizations"
    ):
        private(nn.utils.spectral_norm(network()))
    for model in (
        nn.utils.parametrizations.spectral_norm(network()),
        nn.Sequential(nn.utils.spectral_norm(network())),
    ):
        engine, *parts = private(model)
        steps(*parts)
        assert engine.asked == 5


@pytest.mark.parametrize("kind", ["OFTConfig", "FourierFTConfig"])
def test_adapters_that_write_into_weights(kind):
    peft = pytest.importorskip("peft")
    base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    options = {"oft_block_size": 4, "r": 0} if kind == "OFTConfig" else {"n_frequency": 6, "scaling": 1.0}
    model = peft.get_peft_model(base, getattr(peft, kind)(target_modules=["0"], **options)).train()
    exact(model, (torch.randn(6, 8), torch.randint(2, (6,))), F.cross_entropy, replayed=True)


class Denoiser(nn.Module):
    """Draws a time for each example in its forward pass, as diffusion models do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, clean):
        time = torch.randint(0, 10, (len(clean),))
        noise = torch.randn_like(clean)
        share = torch.linspace(0.9, 0.1, 10)[time][:, None]
        guess = self.layer(torch.cat([share * clean + (1 - share) * noise, time[:, None] / 10], dim=1))
        return (guess - noise).square().mean(dim=1)


def test_a_forward_may_draw_times_for_its_examples():
    model = Denoiser()
    before = model.layer.weight.detach().clone()
    vestige.train(model, lambda losses, _: losses, (X, Y), **PLAN, batch_size=12, steps=2).run()
    assert not torch.equal(before, model.layer.weight)
    engine, model, optimizer, loader = private(Denoiser())
    for clean, _ in loader:
        optimizer.zero_grad()
        model(clean).mean().backward()
        optimizer.step()
    assert engine.asked == 5


def test_a_plan_that_cannot_fit_is_refused_after_one_example(monkeypatch):
    from vestige.recipes import throughput

    timed = []

    def slow(name, shape, *, batch, **options):
        timed.append(batch)
        return float(batch)

    monkeypatch.setattr(throughput, "seconds_a_step", slow)
    code, _, error = command("plan", "--examples", 50_000, "--epsilon", 3, "--time", "1m", "--device", "cpu")
    assert (code, timed) == (2, [1])
    assert "One example was timed on cpu" in error
    assert "--views-per-second" in error
    assert as_json("plan", "--examples", 50_000, "--epsilon", 3, "--time", "90d", "--device", "cpu")["choice"]
    assert timed == [1, 1, 8]


# --- other libraries -------------------------------------------------------------------------------------------------


def test_dpo_of_trl_is_told_to_put_a_pair_into_a_row():
    pytest.importorskip("transformers")
    from vestige.integrations.huggingface import PrivateTrainerMixin

    class DPOTrainer:
        def compute_loss(self):
            pass

    DPOTrainer.__module__ = "trl.trainer.dpo_trainer"
    between = SimpleNamespace(_classes_between=lambda: [DPOTrainer])
    with pytest.raises(
        ValueError, match="a loss of pairs, such as DPO's, is exact in vestige.train, with a pair as one row"
    ):
        PrivateTrainerMixin._whose_loss(between)


def test_a_loss_of_pairs_is_exact_with_a_pair_as_one_row():
    """DPO by hand: the answers' log-likelihoods of one row, against the reference engine."""

    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

        def likelihood(self, tokens):
            logits = self.head(self.embed(tokens[:, :-1]))
            return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).sum(dim=(1, 2))

        def forward(self, chosen, rejected):
            return self.likelihood(chosen) - self.likelihood(rejected)

    def dpo(margin, reference):
        return -F.logsigmoid(0.1 * (margin - reference)).mean()

    random = torch.Generator().manual_seed(1)
    chosen, rejected = torch.randint(7, (2, 40, 6), generator=random)
    margins = torch.randn(40, generator=random)
    found = []
    for engine in ("bookkeeping", "reference"):
        torch.manual_seed(0)
        model = Pairs()
        given = {**PLAN, "batch_size": 10, "steps": 3, "reproducible": 1, "engine": engine}
        vestige.train(model, dpo, (chosen, rejected, margins), **given).run()
        found.append(model.head.weight.detach())
    torch.testing.assert_close(*found)


def test_subclasses_are_kept_by_type():
    for function, name in ((vestige.fix, "model"), (vestige.PrivacyEngine.make_private, "module"),
                           (vestige.PrivacyEngine.make_private_with_epsilon, "module")):  # fmt: skip
        hints = get_type_hints(function)
        assert isinstance(hints[name], TypeVar)
        assert hints[name] in (hints["return"], *get_args(hints["return"]))
    model = Interrupted()
    assert type(vestige.fix(model)) is Interrupted
    assert type(private(model)[1]) is Interrupted


def tiny_classifier(labels=3):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    names = {i: f"kind {i}" for i in range(labels)}
    back = {name: i for i, name in names.items()}
    config = transformers.BertConfig(vocab_size=30, max_position_embeddings=8, id2label=names, label2id=back, **sizes)
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(config)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """What a PrivateTrainer leaves of an adapter, stopped after its first step of four."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from vestige.integrations.huggingface import PrivacyArguments, PrivateTrainer

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    folder = tmp_path_factory.mktemp("adapter")
    rows = [{"input_ids": torch.randint(30, (6,)), "labels": torch.tensor(i % 3)} for i in range(40)]
    model = peft.get_peft_model(tiny_classifier(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"]))
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=10, max_steps=4, report_to=[], disable_tqdm=True, save_strategy="no"
    )
    trainer = PrivateTrainer(
        model=model, args=arguments, train_dataset=rows, callbacks=[Stop()],
        privacy_args=PrivacyArguments(target_epsilon=3, target_delta=1e-3, max_grad_norm=1.0, secure_mode=False),
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="mine")
    return folder, trainer


def test_a_trainers_model_card_has_the_privacy_statement_once(adapter):
    folder, trainer = adapter
    page = (folder / "README.md").read_text()
    assert vestige.model_card(folder) in page
    assert page.count("## Differential privacy") == 1
    assert command("verify", folder)[0] == 0


def test_early_stopping_of_a_trainer_reports_what_was_spent(adapter):
    _, trainer = adapter
    assert trainer.privacy_engine.asked == 1
    spent = trainer.guarantee().epsilon
    assert trainer.state.log_history[-1]["epsilon"] == spent < 2.5
    assert trainer.guarantee().assumption("noise").detail.startswith("added in floating point")  # secure_mode=False


def test_an_adapter_keeps_the_names_of_its_labels(adapter):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder, _ = adapter
    config = transformers.AutoConfig.from_pretrained(folder / "base_config")
    base = transformers.AutoModelForSequenceClassification.from_config(config)
    loaded = peft.PeftModel.from_pretrained(base, folder)
    assert loaded.config.id2label == {0: "kind 0", 1: "kind 1", 2: "kind 2"}
    assert loaded.num_labels == 3


def test_finetune_keeps_label_names_and_says_which_rows_are_empty(tmp_path):
    pytest.importorskip("peft")
    from checkpoints import checkpoint, rows

    base, data = checkpoint(tmp_path / "lm"), rows(tmp_path / "reviews.jsonl")
    lines = data.read_text().splitlines()
    data.write_text("\n".join([*lines[:6], json.dumps({"text": "  ", "label": "pos"}), *lines[6:]]) + "\n")
    words = ["finetune", "--model", base, "--data", data, "--label-column", "label", "--labels", "neg,pos"]
    words += ["--lora", 2, "--epsilon", 8, "--delta", "1e-3", "--batch-size", 10, "--steps", 1, "--max-length", 8]
    with pytest.warns(UserWarning, match="1 of 41 rows hold no text, the first is row 7"):
        as_json(*words, "--out", tmp_path / "run")
    page = (tmp_path / "run" / "adapter" / "README.md").read_text()
    (code,) = [each.split("```")[0] for each in page.split("```python\n")[1:]]
    found = {}
    exec(code.replace('"BASE"', repr(str(base))).replace('"adapter', f'"{tmp_path}/run/adapter'), found)
    assert found["model"].config.id2label == {0: "neg", 1: "pos"}


# --- one name per idea -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("earlier", "now"),
    [
        ({"physical_batch": 5}, {"max_physical_batch_size": 5}),
        ({"noise": "float32"}, {"secure_mode": False}),
        ({"noise": "lattice"}, {"secure_mode": True}),
        ({"engine": "unrecorded"}, {"cuda_graphs": False}),
        ({"public": PUBLIC}, {"validation_data": PUBLIC}),
    ],
    ids=str,
)
def test_earlier_names_of_train_work_with_a_warning_that_names_the_new_one(earlier, now):
    with pytest.warns(FutureWarning, match=f"is called {next(iter(now))}"):
        found = trained(**earlier)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(found, trained(**now))

    with pytest.raises(ValueError, match="alone"):
        trained(**earlier, **now)


def test_other_earlier_names_work_too():
    with pytest.warns(FutureWarning, match="clip is called max_grad_norm now"):
        method = vestige.dp_sgd(clip=0.3)
    assert method == vestige.make_method("dp-sgd", max_grad_norm=0.3)
    assert method.identity["options"]["clip"] == 0.3  # as run folders of 0.1 and 0.2 have it
    with pytest.warns(FutureWarning, match="vestige.build is called vestige.make_method now"):
        assert vestige.build is vestige.make_method
    with pytest.warns(FutureWarning, match="vestige.card is called vestige.model_card now"):
        assert vestige.card is vestige.model_card
    with pytest.warns(FutureWarning, match="vestige.questions is called vestige.priced_questions now"):
        import_module("vestige.questions")
    from vestige import priced_questions

    assert sys.modules["vestige.questions"] is priced_questions
    assert priced_questions.__spec__ is not None
    assert priced_questions.__spec__.name == "vestige.priced_questions"
    del sys.modules["vestige.questions"]
    with pytest.warns(FutureWarning, match="record is called cuda_graphs now"):
        assert not vestige.PrivacyEngine(record=False)._cuda_graphs
    with pytest.raises(ValueError, match="noise='flot' is unknown; choose from lattice, float32"):
        started(noise="flot")


def test_earlier_flags_work_and_are_named(tmp_path):
    words = ["train", "--task", "digits-mlp", "--epsilon", 8, "--batch-size", 50, "--steps", 2]
    old = ["--physical-batch", 30, "--noise=float32", "--engine", "unrecorded", "--clip", 0.5]
    code, _, error = command(*words, *old, "--out", tmp_path / "old")
    assert code == 0
    for flag in ("--max-physical-batch-size", "--no-secure-mode", "--no-cuda-graphs", "--max-grad-norm"):
        assert f"is called {flag} now" in error
    new = ["--max-physical-batch-size", 30, "--no-secure-mode", "--no-cuda-graphs", "--max-grad-norm", 0.5]
    code, _, error = command(*words, *new, "--out", tmp_path / "new")
    assert code == 0
    assert "is called" not in error
    jobs = [json.loads((tmp_path / name / "run.json").read_text())["job"] for name in ("old", "new")]
    assert jobs[0] == jobs[1]
    assert command(*words, "--noise", "flot")[0] == 2


def test_the_same_method_is_the_default_everywhere():
    from vestige.integrations.privacy_arguments import PrivacyArguments
    from vestige.training.job import Job

    assert started(steps=1).method.name == "dp-sgd"
    assert private(network())[0]._private_steps().method.name == "dp-sgd"
    assert PrivacyArguments(target_epsilon=1, target_delta=1e-5).method == Job(task="x").method == "dp-sgd"


def test_a_run_that_was_begun_with_an_earlier_name_goes_on(tmp_path):
    """As `vestige train --clip 0.5` of 0.2 wrote it."""
    from vestige.training.job import Job, load, start
    from vestige.training.run_folder import RunFolder

    out = tmp_path / "run"
    job = Job(task="digits-mlp", options={"max_grad_norm": 0.5}, epsilon=8.0, batch_size=50, steps=3)
    _, training = start(job, out)
    for _ in training.steps():
        break
    training.ledger.close()
    request = json.loads((out / "run.json").read_text())
    request["job"]["options"] = {"clip": request["job"]["options"].pop("max_grad_norm")}
    (out / "run.json").write_text(json.dumps(request))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert load(RunFolder(out)).options == {"max_grad_norm": 0.5}
        assert as_json("train", "--resume", out)["steps"] == 3
    assert as_json("verify", out)["epsilon"] <= 8
