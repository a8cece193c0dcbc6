"""Is a Hugging Face Trainer made private as a loop is, and does nothing raw leave it?"""

import copy
import json
import math
import os
import warnings
from itertools import islice

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from assumption_lists import in_card, in_ledger, listed
from conftest import clip_and_sum
from loops import flat
from vestige import BudgetSpent, PrivacyEngine, model_card
from vestige.accounting.ledger import LedgerError, read
from vestige.priced_questions import SampledGaussian
from vestige.randomness.keys import Randomness
from vestige.training.verify import verify

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from vestige.integrations.huggingface import PrivacyArguments, PrivateTrainer, PrivateTrainerMixin  # noqa: E402

ROWS, BATCH, LENGTH, DELTA = 60, 10, 8, 1e-3
BOUND, LR = 0.3, 0.5
RAW = {"loss", "grad_norm", "train_loss", "total_flos", "train_runtime", "num_tokens", "entropy"}


def bert():
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
            max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def llama(**options):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, vocab_size=97,
            max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=0, **options,
        )
    )  # fmt: skip


def adapted(model=None, **options):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model or llama(), peft.LoraConfig(r=2, task_type="CAUSAL_LM", **options))


def sentences(seed=1, rows=ROWS):
    """Of one length, each of one of three classes."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (rows, LENGTH), generator=source)
    return [{"input_ids": each, "labels": torch.tensor(place % 3)} for place, each in enumerate(ids)]


def texts(seed=1, rows=ROWS):
    """Of several lengths, each its own labels."""
    source = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (rows,), generator=source).tolist()
    return [{"input_ids": torch.randint(3, 90, (n,), generator=source)} for n in lengths]


def padded(rows):
    """To the longest of the batch."""
    length = max(len(row["input_ids"]) for row in rows)
    ids, mask, labels = torch.zeros(3, len(rows), length, dtype=torch.long)
    labels.fill_(-100)
    for place, row in enumerate(rows):
        own = row["input_ids"]
        ids[place, : len(own)], mask[place, : len(own)], labels[place, : len(own)] = own, 1, own
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


class Watching:
    """A collator that remembers what it was given: rows beyond a part's own, which have no weight, left out."""

    def __init__(self, collate):
        self.collate, self.batches = collate, []

    def __call__(self, rows):
        self.batches.append(self.collate(list({id(row): row for row in rows}.values())))
        return self.collate(rows)


def arguments(folder, **options):
    common = {"per_device_train_batch_size": BATCH, "max_steps": 4, "logging_steps": 100, "save_strategy": "no"}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "remove_unused_columns": False}
    return transformers.TrainingArguments(str(folder), **{**common, **quiet, **options})


def asked(**options):
    noise = {} if "target_epsilon" in options else {"noise_multiplier": 1.0}
    return PrivacyArguments(**{"target_delta": DELTA, "max_grad_norm": BOUND, **noise, **options})


def trainer_of(folder, model=None, data=None, privacy=None, cls=PrivateTrainer, collate=None, more=None, **options):
    return cls(
        model=bert() if model is None else model, args=arguments(folder, **options),
        train_dataset=sentences() if data is None else data, data_collator=collate,
        privacy_args=privacy or asked(), **(more or {}),
    )  # fmt: skip


def oracle(model, batches):
    """The clipped sum: each example by itself in float64, with the loss that the model computes of it."""
    model = copy.deepcopy(model).double()
    rows = []
    for batch in batches:
        alone = len(batch["input_ids"]) == 2 and torch.equal(*batch["input_ids"])  # a second row, of no weight
        for place in range(1 if alone else len(batch["input_ids"])):
            model.zero_grad()
            model(**{name: part[[place]] for name, part in batch.items()}).loss.backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
            rows.append(np.concatenate([g.numpy().ravel() for g in grads]))
    return clip_and_sum(np.stack(rows), BOUND)


NOISELESS = {"optim": "sgd", "learning_rate": LR, "lr_scheduler_type": "constant", "max_steps": 1}
COLUMNS = transformers.default_data_collator
CASES = {
    "classes": (bert, sentences, COLUMNS),
    "next token": (llama, texts, padded),
    "an adapter": (lambda: adapted(init_lora_weights=False), texts, padded),
    "a decomposed adapter": (lambda: adapted(init_lora_weights=False, use_dora=True), texts, padded),
}


@pytest.mark.parametrize("accumulation", [1, 5])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.everyday("classes-1")
def test_a_step_is_the_clipped_sum_of_the_examples_own_gradients(name, accumulation, tmp_path):
    build, data, collate = CASES[name]
    model, watching = build(), Watching(collate)
    before, twin = flat(model), copy.deepcopy(model)
    trainer = trainer_of(
        tmp_path, model, data(), asked(noise_multiplier=1e-9), collate=watching, **NOISELESS,
        per_device_train_batch_size=BATCH // accumulation, gradient_accumulation_steps=accumulation,
        gradient_checkpointing=name == "next token",
    )  # fmt: skip
    trainer.train()
    if accumulation > 1:
        assert max(len(batch["input_ids"]) for batch in watching.batches) <= BATCH // accumulation
    found = ((before - flat(model)) * BATCH / LR).double().numpy()
    np.testing.assert_allclose(found, oracle(twin, watching.batches), rtol=2e-3, atol=5e-5)
    assert trainer.guarantee().assumption("loss_per_example").status == "checked"
    assert read(tmp_path / "ledger.jsonl").asks.total() == 1


def test_epsilon_is_that_of_a_loop_with_the_same_settings(tmp_path):
    trainer = trainer_of(tmp_path, privacy=asked(target_epsilon=3), num_train_epochs=1.5, max_steps=-1)
    output = trainer.train()
    engine, model = PrivacyEngine(), bert()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=BOUND, draws=9,
        data_loader=DataLoader(sentences(), batch_size=BATCH), target_epsilon=3, target_delta=DELTA,
    )  # fmt: skip
    for batch in islice((each for _ in range(2) for each in loader), 9):
        model(**batch).loss.backward()
        optimizer.step()
    assert output.global_step == read(tmp_path / "ledger.jsonl").asks.total() == 9
    assert trainer.guarantee().epsilon == engine.guarantee(DELTA).epsilon == output.metrics["epsilon"]
    assert 2.9 < output.metrics["epsilon"] <= 3


class Listening(transformers.TrainerCallback):
    def __init__(self):
        self.heard = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.heard.append(dict(logs))


def test_nothing_raw_is_written_printed_or_heard(tmp_path, capfd):
    listening = Listening()
    trainer = trainer_of(
        tmp_path, more={"eval_dataset": sentences(2, 7), "callbacks": [listening]}, save_strategy="steps",
        save_steps=2, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="loss",
        disable_tqdm=False, logging_steps=1,
    )  # fmt: skip
    output = trainer.train()
    assert math.isnan(output.training_loss)
    states = [json.loads(path.read_text()) for path in tmp_path.rglob("trainer_state.json")]
    assert len(states) == 2
    assert all(state["total_flos"] == 0 == state["num_input_tokens_seen"] for state in states)
    logs = [*listening.heard, *trainer.state.log_history, output.metrics]
    logs += [entry for state in states for entry in state["log_history"]]
    assert not any(RAW & entry.keys() for entry in logs)
    training = [entry for entry in listening.heard if "eval_loss" not in entry]
    assert [len(entry) for entry in training] == [3, 3, 3, 3, 2]
    assert all("epsilon" in entry for entry in training)
    assert sum("eval_loss" in entry for entry in listening.heard) == 2
    assert "'loss'" not in "".join(capfd.readouterr())


def test_a_raw_loss_that_is_asked_for_costs_the_epsilon(tmp_path):
    trainer = trainer_of(tmp_path, privacy=asked(log_nonprivate_loss=True), logging_steps=2)
    with pytest.warns(UserWarning, match="no epsilon is stated"):
        output = trainer.train()
    assert 0.5 < output.training_loss < 3
    assert 0.5 < trainer.state.log_history[0]["loss"] < 3
    assert "grad_norm" not in trainer.state.log_history[0]
    for promise in (trainer.guarantee(), verify(tmp_path).guarantee):
        assert promise.epsilon is None
        assert "without noise were written out" in promise.reasons[0]


def test_what_others_log_of_training_data_is_kept_back_with_a_word(tmp_path):
    class Chatty(transformers.Trainer):
        def log(self, logs, *args):
            super().log({**logs, "confidence": 0.7}, *args)

    class Private(PrivateTrainerMixin, Chatty):
        pass

    trainer = trainer_of(tmp_path, cls=Private, more={"eval_dataset": sentences(2, 7)})
    with pytest.warns(UserWarning, match="kept back from the logs: confidence"):
        trainer.train()
    assert trainer.evaluate(metric_key_prefix="public")["public_loss"] == trainer.state.log_history[-1]["public_loss"]
    assert not any("confidence" in entry for entry in trainer.state.log_history)


def test_the_folder_verifies_and_an_edit_is_seen(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    trainer.save_model()
    verdict = verify(tmp_path)
    assert verdict.asked == 4
    assert verdict.finished
    assert verdict.guarantee.epsilon == trainer.guarantee().epsilon
    assert "model.safetensors" not in verdict.unchecked
    record = json.loads((tmp_path / "privacy.json").read_text())
    assert record["guarantee"]["epsilon"] == verdict.guarantee.epsilon
    assert record["asked"]["max_grad_norm"] == BOUND
    known = in_ledger(next(tmp_path.glob("*ledger.jsonl")))
    assert listed(record["guarantee"]["assumptions"]) == listed(verdict.guarantee.listed) == known
    assert listed(trainer.state.log_history[-1]["assumptions"]) == listed(trainer.guarantee().listed) == known
    assert in_card(model_card(tmp_path)) == known
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    with pytest.raises(LedgerError, match="model.safetensors is not what the run left"):
        verify(tmp_path)


def test_a_run_that_was_killed_resumes_with_all_that_it_asked(tmp_path):
    class Power(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    privacy = asked(method="fo-dp-sgd")
    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, privacy=privacy, more={"callbacks": [Power()]}, **saving).train()
    with pytest.raises(LedgerError, match="not finished"):
        verify(tmp_path)
    again = trainer_of(tmp_path, privacy=privacy, **saving)
    output = again.train(resume_from_checkpoint=True)
    assert output.global_step == 6
    assert again.privacy_engine._steps.step_number == 6
    assert verify(tmp_path).asked == 7, "six steps, and one that was lost"
    assert verify(tmp_path).guarantee.epsilon == again.guarantee().epsilon
    assert "ledger" not in json.dumps(sorted(os.listdir(tmp_path / "checkpoint-6")))
    assert not any(isinstance(value, bytes) for value in torch.load(tmp_path / "checkpoint-6" / "vestige.pt").values())


@pytest.mark.slow
def test_a_budget_that_lost_steps_ends_the_training(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}

    class Power(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer_of(tmp_path, privacy=asked(target_epsilon=3), more={"callbacks": [Power()]}, **saving).train()
    again = trainer_of(tmp_path, privacy=asked(target_epsilon=3), **saving)
    with pytest.warns(UserWarning, match="the budget is spent after step 3"):
        output = again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert output.global_step == 3
    assert output.metrics["epsilon"] <= 3
    with pytest.raises(BudgetSpent):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_folder_is_one_runs(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    with pytest.raises(ValueError, match="exists: it is another run's"):
        trainer_of(tmp_path).train()
    trainer.train()
    assert verify(tmp_path).asked == 8, "the same trainer goes on"
    with pytest.raises(LedgerError, match="cannot read the ledger"):
        only = tmp_path / "other"
        trainer_of(only, save_strategy="steps", save_steps=4).train()
        (only / "ledger.jsonl").unlink()
        trainer_of(only, max_steps=6).train(resume_from_checkpoint=True)


def test_a_checkpoint_without_the_memory_is_not_resumed(tmp_path):
    trainer_of(tmp_path, save_strategy="steps", save_steps=2, save_only_model=True).train()
    with pytest.raises(ValueError, match=r"has no vestige.pt"):
        trainer_of(tmp_path, max_steps=8).train(resume_from_checkpoint=True)


def test_it_evaluates_generates_saves_and_loads(tmp_path):
    peft = pytest.importorskip("peft")
    trainer = trainer_of(
        tmp_path, adapted(), texts(), collate=padded, more={"eval_dataset": texts(2, 9)}, bf16=True,
        gradient_checkpointing=True, learning_rate=0.1,
    )  # fmt: skip
    before = trainer.evaluate()["eval_loss"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    assert trainer.evaluate()["eval_loss"] != before
    trainer.save_model()
    assert "adapter_model.safetensors" not in verify(tmp_path).unchecked
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path)
    given = {"input_ids": torch.randint(3, 90, (2, 5)), "max_new_tokens": 4, "do_sample": False, "use_cache": True}
    trainer.model.eval()
    assert torch.equal(trainer.model.generate(**given), loaded.eval().generate(**given))


def test_a_method_that_remembers_and_a_rate_from_public_facts(tmp_path):
    privacy = asked(method="fo-dp-sgd", lr="auto")
    trainer = trainer_of(tmp_path, privacy=privacy, lr_scheduler_type="constant", learning_rate=1e-9, logging_steps=4)
    trainer.get_train_dataloader()
    expected = trainer.privacy_engine.automatic_rate(4)[0]
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] == expected > 1e-5
    with pytest.raises(ValueError, match="lr='auto' has no rule for the optimizer Adafactor"):
        trainer_of(tmp_path / "other", privacy=asked(lr="auto"), optim="adafactor").train()


def test_arguments_come_from_a_command_line(tmp_path):
    parser = transformers.HfArgumentParser((transformers.TrainingArguments, PrivacyArguments))
    line = f"--output_dir {tmp_path} --target_epsilon 3 --target_delta 1e-3 --max_grad_norm 0.7 --lr auto --use_cpu"
    args, privacy = parser.parse_args_into_dataclasses(line.split())
    assert (privacy.target_epsilon, privacy.noise_multiplier, privacy.lr) == (3.0, None, "auto")
    args.per_device_train_batch_size, args.max_steps, args.report_to = BATCH, 2, []
    args.save_strategy, args.disable_tqdm = "no", True
    trainer = PrivateTrainer(model=bert(), args=args, train_dataset=sentences(), privacy_args=privacy)
    trainer.train()
    assert trainer.privacy_engine._steps.method.clip.bound == 0.7
    assert args.max_grad_norm == 0.7, "the caller's arguments stay as they are"
    assert "--log_nonprivate_loss" in parser.format_help()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of them"),
        ({"target_epsilon": 1, "noise_multiplier": 1}, "give one of them"),
        ({"noise_multiplier": 1, "target_delta": None}, "target_delta=None"),
        ({"noise_multiplier": -1}, "noise_multiplier=-1 must be positive"),
        ({"target_epsilon": 1, "max_grad_norm": 0}, "max_grad_norm=0 must be positive"),
        ({"target_epsilon": 1, "target_delta": 2}, "target_delta=2 must lie below 1"),
        ({"target_epsilon": 1, "lr": "0.1"}, "lr='0.1' must be 'auto'"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError, match=message) as found:
        PrivacyArguments(**{"target_delta": 1e-5, **options})
    assert "\n" not in str(found.value)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(sentences())


class Sorted(transformers.Trainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class PrivateSorted(PrivateTrainerMixin, Sorted):
    pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16": True}, "fp16=True is refused"),
        ({"torch_compile": True}, "torch_compile=True is refused"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is refused"),
        ({"label_smoothing_factor": 0.1}, "divided by everyone's targets"),
        ({"neftune_noise_alpha": 5.0}, "scaled by the padded length"),
        ({"include_num_input_tokens_seen": "all"}, "number of tokens of a sample is not public"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length' is refused"),
        ({"train_sampling_strategy": "sequential"}, "every example is as likely"),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant"),
        ({"max_grad_norm": 0.0, "privacy": asked(max_grad_norm=None)}, "max_grad_norm=0.0 must be positive"),
        ({"cls": PrivateSorted}, "Sorted has its own _get_train_sampler"),
        ({"collate": transformers.DataCollatorWithFlattening()}, "several examples in one row"),
        ({"model": "router"}, "output_router_logits = False"),
        ({"more": "training data"}, "eval_dataset is the training data"),
        ({"debug": "underflow_overflow"}, "prints values of single batches"),
    ],
)
def test_what_would_break_the_guarantee_is_refused(options, message, tmp_path):
    data = sentences()
    if options.get("more") == "training data":
        options = {"more": {"eval_dataset": {"seen": data}}}
    if options.get("model") == "router":
        options = {"model": llama()}
        options["model"].config.output_router_logits = True
    with pytest.raises(ValueError, match=message) as found:
        trainer_of(tmp_path, data=data, **options)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "ledger.jsonl").exists()


def test_what_only_shows_later_is_refused_then(tmp_path):
    with pytest.raises(ValueError, match="rows with indices"):
        trainer_of(tmp_path, data=Stream()).train()
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match="price of its own"):
        trainer.hyperparameter_search()
    for evaluate in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="is the training data"):
            evaluate(trainer.train_dataset)
    with pytest.raises(ValueError, match="call train"):
        trainer.guarantee()

    def flattened(rows):
        return {"input_ids": torch.cat([row["input_ids"] for row in rows])[None], "labels": torch.zeros(1).long()}

    with pytest.raises(ValueError, match=r"the collator made one row of \d+ examples"):
        trainer_of(tmp_path / "flat", collate=flattened).train()

    def numbered(rows):
        return {**COLUMNS(rows), "seq_idx": torch.zeros(len(rows), LENGTH)}

    with pytest.raises(ValueError, match="the batch has seq_idx"):
        trainer_of(tmp_path / "numbered", collate=numbered).train()


class Weighing(transformers.Trainer):
    """As trainers with a loss of their own do it: over everyone's number of targets, if they are told it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert num_items_in_batch is None
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = (torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="none") * 2).mean()
        return (loss, outputs) if return_outputs else loss


class Counting(transformers.Trainer):
    """Weighs classes by how often the batch has them: everybody's labels decide about everybody's gradient."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        weight = 1 / torch.nn.functional.one_hot(labels, 3).float().sum(0).clamp(min=1)
        return torch.nn.functional.cross_entropy(model(**inputs).logits, labels, weight=weight)


def test_a_trainers_own_loss_that_counts_the_batch_is_refused(tmp_path):
    class Private(PrivateTrainerMixin, Counting):
        pass

    with pytest.raises(ValueError, match=r"the loss is not each row's own: sum at .*test_huggingface.py:\d+"):
        trainer_of(tmp_path, cls=Private).train()


def test_a_trainers_own_loss_of_each_row_is_followed(tmp_path):
    class Private(PrivateTrainerMixin, Weighing):
        pass

    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = trainer_of(tmp_path, model, cls=Private, more={"optimizers": (optimizer, None)})
    trainer.train()
    assert trainer.guarantee().assumption("loss_per_example").status == "checked"


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{**{k: v.tolist() for k, v in row.items()}, "name": "somebody"} for row in sentences()]
    trainer = trainer_of(tmp_path, data=datasets.Dataset.from_list(rows), remove_unused_columns=True, max_steps=2)
    trainer.train()
    trainer.create_model_card()
    assert verify(tmp_path).asked == 2


def test_adapters_come_before_make_private():
    peft = pytest.importorskip("peft")
    model, engine = llama(), PrivacyEngine()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(texts(), batch_size=BATCH, collate_fn=padded),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    late = peft.get_peft_model(model, peft.LoraConfig(r=2, task_type="CAUSAL_LM")).train()
    with pytest.raises(ValueError, match="get_peft_model comes before it"):
        late(**next(iter(loader)))


def adapter_step(change):
    """A private step of an adapter, whose optimizer or model is changed before it."""
    model, engine = adapted().train(), PrivacyEngine()
    model.to("cpu")
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    _, _, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(texts(), batch_size=BATCH, collate_fn=padded),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    change(model, optimizer)
    frozen = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = flat(model)
    for place, batch in enumerate(loader):
        model(**batch).loss.backward()
        optimizer.step()
        if place == 1:
            break
    assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
    return before, flat(model)


def test_after_the_first_step_adapters_moved_and_the_rest_stayed():
    before, after = adapter_step(lambda model, optimizer: None)
    assert not torch.equal(before, after)

    def stale(model, optimizer):
        for group in optimizer.param_groups:
            group["params"] = [torch.nn.Parameter(p.detach().clone(), False) for p in group["params"]]

    with pytest.raises(ValueError, match=r"lora_A.* did not move in the first step"):
        adapter_step(stale)

    def leaking(model, optimizer):
        frozen = next(p for p in model.parameters() if not p.requires_grad)
        optimizer.register_step_post_hook(lambda *_: frozen.data.view(-1)[0].add_(1))

    with pytest.raises(ValueError, match="is frozen, but the first step changed it"):
        adapter_step(leaking)

    def warming(model, optimizer):
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)

    before, after = adapter_step(warming)
    assert torch.equal(before, after), "a rate of zero moves nothing, and is no mistake"


def test_supervised_fine_tuning_of_trl(tmp_path):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t2"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")

    class PrivateSFT(PrivateTrainerMixin, trl.SFTTrainer):
        pass

    def sft(folder, rows=None, **options):
        args = trl.SFTConfig(
            str(folder), per_device_train_batch_size=BATCH, logging_steps=1, report_to=[], use_cpu=True, bf16=False,
            disable_tqdm=True, save_strategy="no", **{**NOISELESS, **options},
        )  # fmt: skip
        data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in texts()])
        return PrivateSFT(
            model=llama(), args=args, train_dataset=data, eval_dataset=rows and data, processing_class=tokenizer,
            privacy_args=asked(noise_multiplier=1e-9),
        )  # fmt: skip

    trainer = sft(tmp_path / "a")
    watching = trainer.data_collator = Watching(trainer.data_collator)
    before, twin = flat(trainer.model), llama()
    trainer.train()
    found = ((before - flat(trainer.model)) * BATCH / LR).double().numpy()
    np.testing.assert_allclose(found, oracle(twin, watching.batches), rtol=2e-3, atol=5e-5)
    assert trainer.guarantee().assumption("loss_per_example").status == "checked"
    assert not any((RAW | {"mean_token_accuracy"}) & entry.keys() for entry in trainer.state.log_history)
    for options in (
        {"packing": True},
        {"padding_free": True, "max_length": None},
        {"loss_type": "dft"},
        {"rows": True},
    ):
        with pytest.raises(ValueError, match="is refused in private|several examples in one row|is the training data"):
            sft(tmp_path / "b", **options)


def test_a_user_column_is_priced_and_not_given_to_the_model(tmp_path):
    named = [{**row, "author": f"a{place // 3}"} for place, row in enumerate(sentences())]
    users = -(-ROWS // 3)
    trainer = trainer_of(tmp_path, data=named, privacy=asked(user_column="author"), max_steps=2)
    trainer.train()
    said = trainer.guarantee()
    assert said.adjacency == "zero-out all rows of one user (at most 3)"
    alone = trainer_of(tmp_path / "rows", max_steps=2)
    alone.train()
    assert said.epsilon > alone.guarantee().epsilon
    opened = json.loads((tmp_path / "ledger.jsonl").read_text().splitlines()[0])
    assert opened["users"]["users"] == users
    with pytest.raises(ValueError, match="users='writer' is no column"):
        trainer_of(tmp_path / "wrong", data=named, privacy=asked(user_column="writer")).train()
    with pytest.raises(ValueError, match="cap=2 is about users"):
        asked(cap=2)


@pytest.mark.parametrize("accumulation", [1, 5])
def test_a_step_on_users_is_the_clipped_sum_of_their_mean_gradients(accumulation, tmp_path, monkeypatch):
    monkeypatch.setattr(Randomness, "secret", classmethod(lambda cls: cls.reproducible(3)))  # users of both kinds
    named = [{**row, "author": place // 3 if place < 45 else place} for place, row in enumerate(sentences())]
    owner = {tuple(row["input_ids"].tolist()): row["author"] for row in named}
    model, watching = bert(), Watching(COLUMNS)
    before, twin = flat(model), copy.deepcopy(model).train()
    trainer = trainer_of(
        tmp_path, model, named, asked(noise_multiplier=1e-9, user_column="author", sample="users"), collate=watching,
        **NOISELESS, per_device_train_batch_size=BATCH // accumulation, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    trainer.train()
    users = {}
    for batch in watching.batches:
        for ids, label in zip(batch["input_ids"], batch["labels"], strict=True):
            users.setdefault(owner[tuple(ids.tolist())], {})[tuple(ids.tolist())] = ids, label
    assert {len(rows) for rows in users.values()} == {1, 3}
    means = []
    for rows in users.values():
        ids, labels = (torch.stack(each) for each in zip(*rows.values(), strict=True))
        twin.zero_grad()
        twin(input_ids=ids, labels=labels).loss.backward()
        means.append(
            np.concatenate(
                [np.zeros(p.numel()) if p.grad is None else p.grad.numpy().ravel() for p in twin.parameters()]
            )
        )
    expected = clip_and_sum(np.stack(means), BOUND) / (BATCH / ROWS * 30)
    np.testing.assert_allclose((before - flat(model)).double().numpy() / LR, expected, rtol=2e-3, atol=1e-5)
    said = trainer.guarantee()
    assert (said.unit, set(trainer.privacy_engine.spent)) == ("user", {SampledGaussian(BATCH / ROWS, 1e-9)})


class Rows(nn.Module):
    """A model that computes its loss itself, of rows of numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(5, 3)

    def forward(self, x, labels):
        logits = self.inner(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_blanking_an_author_moves_a_step_by_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(Randomness, "secret", classmethod(lambda cls: cls.reproducible(3)))  # the same sample twice
    owners, found, drawn = [place // 3 for place in range(ROWS)], [], []
    x = 30 * torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1))  # every gradient is clipped
    for blank in (None, 5):
        rows = [x[place] * (torch.nan if owner == blank else 1.0) for place, owner in enumerate(owners)]
        data = [{"x": x, "labels": torch.tensor(k % 3), "author": owners[k]} for k, x in enumerate(rows)]
        model, watching = Rows(), Watching(COLUMNS)
        privacy = asked(noise_multiplier=1e-9, user_column="author", sample="users")
        options = NOISELESS | {"per_device_train_batch_size": 5 * BATCH}
        trainer_of(tmp_path / str(blank), model, data, privacy, collate=watching, **options).train()
        found.append(flat(model).double())
        drawn.append(sum(int(batch["x"].isnan().any(dim=1).sum()) for batch in watching.batches))
    assert drawn == [0, 3], "the author was drawn"
    expected = 5 * BATCH / ROWS * len(set(owners))
    assert float((found[0] - found[1]).norm()) / LR * expected == pytest.approx(BOUND, rel=1e-3)


def test_a_trainer_is_charged_to_the_book_of_its_data(tmp_path):
    from vestige.budget import Book, terms
    from vestige.budget.verify import verify as verify_book

    book = Book.create(tmp_path / "book", terms(30.0, DELTA))
    privacy = PrivacyArguments(noise_multiplier=1.0, target_delta=DELTA, budget=str(book.path))
    trainer = trainer_of(tmp_path / "run", privacy=privacy)
    trainer.train()
    [held] = Book(book.path, whole=True).state.reservations.values()
    assert held.why == "finished"
    assert held.asked == trainer.privacy_engine.spent
    assert verify_book(book.path, [tmp_path / "run"]).runs == 1
    with pytest.raises(ValueError, match="derived_from='x' is about a book"):
        PrivacyArguments(noise_multiplier=1.0, target_delta=DELTA, derived_from="x")
