"""Does `vestige finetune` train what it says, keep its books, and refuse mistakes without a word about the data?"""

import copy
import json
import math
import os
import shutil
import signal
import time
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from commands import as_json, started, vestige
from conftest import clip_and_sum

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft
import transformers

from assumption_lists import in_card, in_ledger, listed
from checkpoints import checkpoint, rows, words
from vestige.finetuning import pretrained_models
from vestige.finetuning.job import FineTuning, complete, start

PLAN = ["--epsilon", "8", "--delta", "1e-3", "--batch-size", "10", "--steps", "3", "--max-length", "16"]
LABELS = ["--label-column", "label", "--labels", "neg,pos"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a language model, a classifier, one without a padding token, and reviews."""
    folder = tmp_path_factory.mktemp("made")
    checkpoint(folder / "lm")
    checkpoint(folder / "unpadded", pad=False)
    names = {"id2label": {0: "neg", 1: "pos"}, "label2id": {"neg": 0, "pos": 1}}
    checkpoint(folder / "classifier", "BertForSequenceClassification", **names)
    checkpoint(folder / "encoder", "BertModel")
    rows(folder / "reviews.jsonl")
    return folder


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("aim", ["classification", "causal-lm"])
def test_public_texts_judge_the_model_that_was_saved(made, tmp_path, aim):
    """Against Hugging Face's own loss, one text at a time, unpadded, in float64."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    run, test, extra = tmp_path / "run", rows(tmp_path / "test.jsonl", 7), LABELS if aim == "classification" else []
    result = as_json("finetune", "--model", made / "lm", "--data", made / "reviews.jsonl", "--test", test, *PLAN,
                     *extra, "--out", run)  # fmt: skip
    kind = AutoModelForSequenceClassification if aim == "classification" else AutoModelForCausalLM
    model, tokenizer = kind.from_pretrained(run / "model").double().eval(), AutoTokenizer.from_pretrained(run / "model")
    right, nats, tokens = 0, 0.0, 0
    for number in range(7):
        text = tokenizer(words(number), truncation=True, max_length=16, return_tensors="pt")["input_ids"]
        if aim == "classification":
            right += int(model(input_ids=text).logits.argmax()) == number % 2
        else:
            nats += model(input_ids=text, labels=text).loss.item() * (text.shape[1] - 1)
            tokens += text.shape[1] - 1
    if aim == "classification":
        assert result["accuracy"] == right / 7
    else:
        assert result["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert ("accuracy" in result) != ("perplexity" in result)
    assert as_json("verify", run)["unchecked"] == []


@pytest.mark.parametrize("aim", ["classification", "causal-lm"])
@pytest.mark.everyday("causal-lm")
def test_an_adapter_loads_as_hugging_face_loads_it_and_the_books_are_right(made, tmp_path, aim):
    run, extra = tmp_path / "run", LABELS if aim == "classification" else []
    result = as_json("finetune", "--model", made / "lm", "--data", made / "reviews.jsonl", *PLAN, *extra, "--lora", 4,
                     "--out", run)  # fmt: skip
    assert result["task"] == aim
    assert 7.9 < result["epsilon"] <= 8
    assert result["saved"] == str(run / "adapter")
    assert result["padded_tokens_per_second"] > 0
    asks = [
        row for line in (run / "ledger.jsonl").read_text().splitlines() if (row := json.loads(line))["row"] == "ask"
    ]
    assert len(asks) == result["asked"] == result["steps"] == 3
    verdict = as_json("verify", run)
    assert (verdict["epsilon"], verdict["asked"], verdict["unchecked"]) == (result["epsilon"], 3, [])

    if aim == "classification":
        base = transformers.AutoModelForSequenceClassification.from_pretrained(made / "lm", num_labels=2)
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(made / "lm")
    loaded = peft.PeftModel.from_pretrained(base, run / "adapter")
    trained = torch.load(run / "model.pt", weights_only=True)
    reloaded = {name: value for name, value in loaded.state_dict().items() if "original_module" not in name}
    assert any("lora_B" in name and value.any() for name, value in reloaded.items())
    for name, value in reloaded.items():
        torch.testing.assert_close(value, trained[name], rtol=0, atol=0, msg=name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(run / "adapter")
    assert tokenizer.decode(tokenizer(words(1))["input_ids"]) == words(1)

    known = in_ledger(run / "ledger.jsonl")
    assert listed(result["assumptions"]) == listed(verdict["assumptions"]) == known
    assert listed(json.loads((run / "result.json").read_text())["assumptions"]) == known
    assert in_card((run / "report.md").read_text()) == known
    page = (run / "adapter" / "README.md").read_text()
    assert page.startswith("---\nlibrary_name: peft\n")
    assert (run / "report.md").read_text() in page
    assert vestige("card", run)[1] == (run / "report.md").read_text()
    assert vestige("report", run)[0] == 0
    assert vestige("verify", run)[0] == 0


def test_a_saved_adapter_is_sealed_and_its_card_may_be_edited(made, tmp_path):
    run = tmp_path / "run"
    as_json("finetune", "--model", made / "lm", "--data", made / "reviews.jsonl", *PLAN, "--lora", 2, "--out", run)
    (run / "adapter" / "README.md").write_text("mine")
    assert vestige("verify", run)[0] == 0
    weights = run / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    code, _, error = vestige("verify", run)
    assert code == 1
    assert "adapter_model.safetensors is not what the run left" in error


def test_a_whole_model_a_new_head_and_frozen_parts(made, tmp_path):
    run, table = tmp_path / "run", tmp_path / "reviews.csv"
    lines = [f'"{words(number)}",{("bad", "fair", "good")[number % 3]}' for number in range(30)]
    table.write_text("body,grade\n" + "\n".join(lines) + "\n")
    options = ["--text-column", "body", "--label-column", "grade", "--labels", "bad,fair,good"]
    frozen = ["--freeze", "bert.embeddings*;bert.encoder.layer.0.*"]
    as_json("finetune", "--model", made / "encoder", "--data", table, *PLAN, *options, *frozen, "--out", run)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run / "model")
    before = transformers.BertModel.from_pretrained(made / "encoder").state_dict()
    after, trained = model.state_dict(), torch.load(run / "model.pt", weights_only=True)
    assert model.config.id2label == {0: "bad", 1: "fair", 2: "good"}
    assert all(torch.equal(value, trained[name]) for name, value in after.items())
    for name, value in before.items():
        still = name.startswith(("embeddings", "encoder.layer.0."))
        assert still == torch.equal(value, after[f"bert.{name}"]) or not value.any(), name


def test_the_numbers_of_labels_are_those_of_the_head(made, tmp_path):
    """Declared in another order, names still mean what the checkpoint says."""
    job = FineTuning(
        model=str(made / "classifier"), data=str(made / "reviews.jsonl"), label_column="label", labels=("pos", "neg"),
        epsilon=8, delta=1e-3, batch=10, steps=1, max_length=16,
    )  # fmt: skip
    _, _, training = start(job, tmp_path / "run")
    assert [int(training._examples._rows.dataset[row]["labels"]) for row in range(4)] == [0, 1, 0, 1]
    training.ledger.close()


def test_parquet_and_numbers_as_labels(made, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"text": [words(number) for number in range(20)], "label": [n % 2 for n in range(20)]})
    parquet.write_table(table, tmp_path / "reviews.parquet")
    result = as_json(
        "finetune", "--model", made / "classifier", "--data", tmp_path / "reviews.parquet", "--label-column", "label",
        *PLAN, "--num-workers", 1, "--out", tmp_path / "run",
    )  # fmt: skip
    assert result["steps"] == 3


def test_epochs_decide_the_steps_and_a_seeded_run_has_no_epsilon(made, tmp_path):
    run = tmp_path / "run"
    words = ["--epsilon", 8, "--delta", "1e-3", "--batch-size", 20, "--epochs", 2, "--max-length", 16, "--reproducible"]
    code, out, error = vestige(
        "finetune", "--model", made / "unpadded", "--pad-token", "<end>", "--data", made / "reviews.jsonl", *words,
        "--method", "dp-sgd", "--lr", 0.1, "--out", run,
    )  # fmt: skip
    assert code == 0, error
    assert "NOT PRIVATE" in error
    assert "privacy        none: the noise was drawn from a known seed" in out
    assert "No epsilon holds for this model" in (run / "model" / "README.md").read_text()
    assert json.loads((run / "result.json").read_text())["steps"] == 4


@pytest.mark.parametrize(
    ("aim", "more"), [("causal-lm", {"lora": 3}), ("causal-lm", {"tokens_per_example": 5}), ("classification", {})]
)
@pytest.mark.everyday("classification-more2")
def test_a_step_without_noise_is_the_sum_of_clipped_gradients_one_example_at_a_time(made, tmp_path, aim, more):
    """By Hugging Face's own loss, of texts that nobody padded, in float64."""
    bound, lr, count = 0.3, 0.5, 12
    if aim == "classification":
        more = {**more, "label_column": "label", "labels": ("neg", "pos")}
    file = rows(tmp_path / "reviews.jsonl", count)
    job = FineTuning(
        model=str(made / "lm"), data=str(file), method="dp-sgd", options={"clip": bound}, lr=lr, noise_multiplier=1e-9,
        delta=1e-3, batch=count, steps=1, max_length=16, reproducible=True, **more,
    )  # fmt: skip
    fine, _, training = start(job, tmp_path / "run")
    model = copy.deepcopy(fine.model).double()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = []
    for number in range(count):
        tokens = fine.tokenizer(words(number), truncation=True, max_length=16, return_tensors="pt")["input_ids"]
        labels = tokens if aim == "causal-lm" else torch.tensor([number % 2])
        loss = model(input_ids=tokens, labels=labels).loss
        if job.tokens_per_example is not None:
            loss = loss * (tokens.shape[1] - 1) / job.tokens_per_example
        grads = torch.autograd.grad(loss, list(trainable.values()), allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(trainable.values(), grads, strict=True)]
        gradients.append(np.concatenate([g.numpy().ravel() for g in filled]))
    complete(job, fine, None, training, lambda record: True)
    after = dict(fine.model.named_parameters())
    moved = np.concatenate([(p - after[name].double()).detach().numpy().ravel() for name, p in trainable.items()])
    want = clip_and_sum(np.stack(gradients), bound)
    assert np.linalg.norm(moved * count / lr - want) <= 1e-4 * np.linalg.norm(want)


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_finishes_with_the_same_budget(made, tmp_path):
    run, ledger = tmp_path / "run", tmp_path / "run" / "ledger.jsonl"
    process = started(
        "finetune", "--model", made / "lm", "--data", made / "reviews.jsonl", "--lora", 2, "--epsilon", 8, "--delta",
        "1e-3", "--batch-size", 4, "--steps", 50, "--max-length", 16, "--out", run,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (ledger.exists() and ledger.read_text().count("\n") > 5) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert f"continue with: vestige finetune --resume {run}" in error
    assert not (run / "adapter").exists()
    assert "(interrupted)" in out
    code, _, error = vestige("train", "--resume", run)
    assert (code, error) == (2, f"vestige: '{run}' is a run of vestige finetune: vestige finetune --resume {run}\n")
    code, _, error = vestige("finetune", "--resume", run, "--lora", 3)
    assert (code, error.count("\n")) == (2, 1)
    assert "--lora cannot be given too" in error
    result = as_json("finetune", "--resume", run)
    assert (result["steps"], result["asked"], result["stopped"]) == (50, 50, "finished")
    assert as_json("verify", run)["attempts"] == 2
    assert "in 2 attempts, all charged" in (run / "adapter" / "README.md").read_text()
    code, _, error = vestige("finetune", "--resume", run)
    assert code == 2
    assert "is already finished" in error


# --- mistakes ---------------------------------------------------------------------------------------------------------

SECRET = "classified"


def secrets(file, **changes):
    """Rows whose every value is a secret."""
    return rows(file, **{"text": SECRET, "label": SECRET, **changes})


def refused(made, tmp_path, message, *words, model="lm", data=None):
    """One line, nothing written, no value of the data."""
    data = data or secrets(tmp_path / "reviews.jsonl")
    there = sorted(tmp_path.rglob("*"))
    code, out, error = vestige(
        "finetune", "--model", made / model, "--data", data, *PLAN, *words, "--out", tmp_path / "run"
    )  # fmt: skip
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert message in error
    assert SECRET not in error
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--text-column", "txt"], "--text-column='txt': line 1 of --data="),
        (["--label-column", "lable"], "--label-column='lable': line 1 of --data="),
        (LABELS, "the label of row 1 is none of the 2 that are declared"),
        (["--label-column", "label"], "the label of row 1 is none of the 2 that are declared"),
        ([*LABELS[:-1], "neg,neg"], "--labels='neg,neg' must be two or more different names"),
        (["--task", "classification"], "--label-column is missing"),
        (["--task", "regression"], "--task='regression' is unknown"),
        ([*LABELS, "--task", "causal-lm"], "--label-column='label' goes with --task='classification'"),
        ([*LABELS, "--tokens-per-example", "3"], "--tokens-per-example=3 goes with causal-lm"),
        (["--max-length", "33"], "--max-length=33 is more than the 32 tokens"),
        (["--max-length", "0"], "--max-length=0 must be a whole number from 1 up"),
        (["--lora", "0"], "--lora=0 must be a whole number from 1 up"),
        (["--lora", "2", "--lora-targets", "nowhere"], "--lora-targets='nowhere': the model has no such linear layers"),
        (["--lora-targets", "c_attn"], "--lora-targets='c_attn' goes with --lora=8"),
        (["--lora", "2", "--freeze", "*"], "--freeze='*' cannot be given too"),
        (["--freeze", "nothing*"], "--freeze='nothing*' matches no parameter"),
        (["--freeze", "*"], "--freeze='*' leaves nothing to train"),
        (["--pad-token", "[PAD]"], "--pad-token='[PAD]' is no token of --model="),
        (["--epochs", "2"], "--epochs=2 and --steps=3: give one of them"),
        (["--batch-size", "41"], "--batch-size=41 is more than the 40 rows of --data="),
        (["--delta", "0.1"], "--delta=0.1 is not below 1/N"),
        (["--lr", "x"], "--lr='x' must be a number"),
        (["--method", "dp-sgd"], "--lr is missing: give a learning rate"),
        (["--test", "nowhere.jsonl"], "--test='nowhere.jsonl': there is no such file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(made, tmp_path, words, message):
    refused(made, tmp_path, message, *words)


def test_texts_that_are_trained_on_are_no_test(made, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(made / "reviews.jsonl")
    link, data = tmp_path / "link.jsonl", made / "reviews.jsonl"
    refused(made, tmp_path, "is the training data", "--test", link, data=data)


def test_files_that_are_none(made, tmp_path):
    readable = find_spec("pyarrow") is not None

    def file(name, content):
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    for data, message in [
        (tmp_path / "nowhere.jsonl", "there is no such file"),
        (file("empty.jsonl", b""), "holds no rows"),
        (file("empty.csv", b""), "holds no rows"),
        (file("header.csv", b"text,label\n"), "holds no rows"),
        (file("headless.csv", f"{SECRET},{SECRET}\n{SECRET},1\n".encode()), "--text-column='text': --data="),
        (file("short.csv", f"label,text\n{SECRET}\n".encode()), "--text-column='text': row 1 of --data="),
        (file("torn.jsonl", f'{{"text": "{SECRET}'.encode()), "line 1 is not a JSON object"),
        (file("latin.jsonl", b'{"text": "caf\xe9"}'), "is not text in UTF-8"),
        (file("number.jsonl", b'{"text": 7}'), "row 1 holds no text"),
        (file("null.jsonl", b'{"text": null}'), "has nothing in that column"),
        (file("reviews.txt", SECRET.encode()), "must be one of .jsonl, .csv, .parquet"),
        (
            file("torn.parquet", SECRET.encode()),
            "is not a readable .parquet file" if readable else "needs pyarrow, which is not installed",
        ),
    ]:
        refused(made, tmp_path, message, data=data)


def test_checkpoints_that_are_none(made, tmp_path):
    refused(
        made, tmp_path, "has no padding token: choose one of its tokens, such as --pad-token='<end>'", model="unpadded"
    )
    refused(made, tmp_path, "is no checkpoint: give a folder with a config.json", model="nowhere")
    declared = [*LABELS[:-1], "neg,pos,odd"]
    refused(made, tmp_path, "are 3, and the head of --model=", *declared, model="classifier")
    refused(made, tmp_path, "has no weights for", model="encoder")
    bare = made / "bare"
    if not bare.exists():
        shutil.copytree(made / "lm", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    refused(made, tmp_path, "has no tokenizer", model="bare")
    torn = made / "torn"
    if not torn.exists():
        shutil.copytree(made / "lm", torn, ignore=shutil.ignore_patterns("*.safetensors"))
    refused(made, tmp_path, "it cannot be loaded for causal-lm", model="torn")


def test_code_of_a_checkpoint_is_not_run(made, tmp_path):
    folder = tmp_path / "theirs"
    shutil.copytree(made / "lm", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\n")
    refused(tmp_path, tmp_path, "its configuration cannot be read", model="theirs")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("package", "words"), [("transformers", []), ("peft", ["--lora", "4"])])
def test_a_missing_package_is_named_with_the_extra_that_has_it(made, tmp_path, monkeypatch, package, words):
    real = pretrained_models.find_spec
    monkeypatch.setattr(pretrained_models, "find_spec", lambda name: None if name == package else real(name))
    refused(made, tmp_path, f"needs {package}, which is not installed: pip install 'vestige[huggingface]'", *words)


def test_a_command_needs_a_model_and_data_and_a_free_folder(made, tmp_path):
    assert vestige("finetune")[::2] == (2, "vestige: --model is missing: give a checkpoint's folder\n")
    assert vestige("finetune", "--model", "x")[::2] == (2, "vestige: --data is missing: give a file\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").touch()
    refused(made, tmp_path, "is not an empty folder", data=made / "reviews.jsonl")


def test_a_user_column(made, tmp_path):
    reviews = [json.loads(line) for line in (made / "reviews.jsonl").read_text().splitlines()]
    path = tmp_path / "reviews.jsonl"
    path.write_text("".join(json.dumps(row | {"author": i // 2}) + "\n" for i, row in enumerate(reviews)))
    words = ["finetune", "--model", made / "lm", "--data", path, *PLAN, *LABELS, "--user-column", "author"]
    result = as_json(*words, "--sample", "users", "--out", tmp_path / "run")
    assert result["adjacency"] == "zero-out all rows of one user"
    assert "all rows of one user" in (tmp_path / "run" / "report.md").read_text()
