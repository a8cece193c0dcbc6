"""What do several processes train through other libraries, in tests? Small runs, each in one function."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import vestige
from process_gang import LOSS, data, flat, network


def finetuned(
    job: Any, out: Path, *, stop: int | None = None, resume: bool = False, reverse: bool = False, **changes: Any
) -> dict[str, Any]:
    """A run of `vestige finetune`, or its first steps."""
    from vestige.finetuning.job import complete, load, start
    from vestige.training.run_folder import RunFolder

    if reverse:
        changes["data"] = str(out.with_name("reversed.jsonl"))
        Path(changes["data"]).write_text("".join(reversed(Path(job.data).read_text().splitlines(keepends=True))))
    job = load(RunFolder(out)) if resume else replace(job, **changes)
    checkpoint, public, training = start(job, out, resume=resume)
    result = complete(job, checkpoint, public, training, lambda record: record.step != stop)
    return {
        "weights": torch.cat([p.detach().ravel() for p in training.model.parameters() if p.requires_grad]),
        "asked": sum(training.ledger.spent.values()),
        "epsilon": training.guarantee().epsilon_if_noise_were_secret,
        "quality": result.perplexity if result.accuracy is None else result.accuracy,
        "stopped": result.stopped,
    }


def accelerated(
    order: str = "prepare, make_private",
    *,
    several: bool = True,
    physical: int | None = None,
    buffer: bool = False,
    loading: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """A loop of two epochs under Accelerate, with `prepare` before or after `make_private`."""
    import accelerate

    with environment(several):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        configuration = accelerate.DataLoaderConfiguration(**(loading or {}))
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration, **options)
        assert accelerator.num_processes == (2 if several else 1)
        model = network()
        if buffer:
            model.register_buffer("constant", torch.ones(2))
        parts: Any = (
            model,
            torch.optim.Adam(model.parameters(), lr=0.05),
            DataLoader(TensorDataset(*data()), batch_size=12, shuffle=True),
        )
        engine = vestige.PrivacyEngine(reproducible=5)

        def make_private(module: Any, optimizer: Any, loader: Any) -> Any:
            return engine.make_private(
                module=module, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
                method="fo-dp-sgd", max_physical_batch_size=physical,
            )  # fmt: skip

        ways = [accelerator.prepare, make_private]
        for way in ways if order == "prepare, make_private" else reversed(ways):
            parts = way(*parts)
        model, optimizer, loader = parts
        assert isinstance(model, nn.parallel.DistributedDataParallel) == several
        read = []
        for _ in range(2):
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(LOSS(model(x), y))
                    assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 0
                    optimizer.step()
                    optimizer.zero_grad()
                read.append(x)
        return {
            "weights": flat(model),
            "asked": engine._ledger.spent.total(),
            "epsilon": engine.guarantee(1e-3).epsilon_if_noise_were_secret,
            "steps": engine._steps.step_number,
            "rows": torch.cat(read),
        }


def tuned(
    out: Path, *, several: bool = True, resume: Any = None, reproducible: int | None = 5, **options: Any
) -> dict[str, Any]:
    """A run of Hugging Face's Trainer; the sample is the same for any number of processes."""
    import accelerate
    import transformers

    from vestige.integrations import huggingface

    with environment(several):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        settings = {
            "per_device_train_batch_size": 3 if several else 6, "gradient_accumulation_steps": 2, "max_steps": 4,
            "save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True,
            "disable_tqdm": True, "learning_rate": 0.01, "remove_unused_columns": False,
            # With it the Trainer doubles this model's loss of public data in two processes, private or not.
            "average_tokens_across_devices": False, **options,
        }  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.BertForSequenceClassification(
                transformers.BertConfig(
                    vocab_size=97, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
                    max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
                )
            )  # fmt: skip
        ids = torch.randint(3, 90, (60, 8), generator=torch.Generator().manual_seed(1))
        rows = [{"input_ids": each, "labels": torch.tensor(place % 3)} for place, each in enumerate(ids)]
        engine, huggingface.PrivacyEngine = (
            huggingface.PrivacyEngine,
            partial(vestige.PrivacyEngine, reproducible=reproducible),
        )  # type: ignore[assignment]
        try:
            trainer = huggingface.PrivateTrainer(
                model=model, args=transformers.TrainingArguments(str(out), **settings), train_dataset=rows,
                eval_dataset=[dict(row) for row in rows[:8]],
                privacy_args=huggingface.PrivacyArguments(noise_multiplier=1.0, target_delta=1e-3, max_grad_norm=0.3),
            )  # fmt: skip
            wrapped = []
            step = trainer.training_step
            trainer.training_step = lambda model, *more: (wrapped.append(type(model).__name__), step(model, *more))[1]
            trainer.train(resume_from_checkpoint=resume)
        finally:
            huggingface.PrivacyEngine = engine
        assert set(wrapped) == ({"DistributedDataParallel"} if several else {type(model).__name__})
        held = trainer.privacy_engine
        held._ledger.close()
        return {
            "weights": flat(model),
            "asked": held._ledger.spent.total(),
            "epsilon": trainer.guarantee().epsilon_if_noise_were_secret
            if reproducible
            else trainer.guarantee().epsilon,
            "rate": held._steps.planned.rate,
            "loss": trainer.evaluate()["eval_loss"],
            "logged": sorted({key for row in trainer.state.log_history for key in row}),
        }


def lightning(
    *,
    several: bool = True,
    calls: str = "self",
    ledger: Path | None = None,
    checkpoint: Path | None = None,
    resume: Path | None = None,
    epochs: int = 2,
    **options: Any,
) -> dict[str, Any]:
    """A fit by Lightning's trainer; without a group, Lightning starts the other process itself."""
    import logging
    import warnings

    import lightning.pytorch as pl

    from vestige.integrations.lightning import Private

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return LOSS(self(batch[0]) if calls == "self" else self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", LOSS(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.05)

    with environment(several and torch.distributed.is_initialized()):
        private = Private(
            delta=1e-3, noise_multiplier=1.0, reproducible=5, method="fo-dp-sgd", ledger=ledger, **options
        )
        more = {"strategy": "ddp", "devices": 2} if several else {"devices": 1}
        trainer = pl.Trainer(
            logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
            accelerator="cpu", num_sanity_val_steps=0, max_epochs=epochs, callbacks=[private], **more,
        )  # fmt: skip
        model, examples = Model(), TensorDataset(*data())
        train = DataLoader(examples, batch_size=12, shuffle=True)
        public = DataLoader(TensorDataset(*data(seed=7)), batch_size=30)
        trainer.fit(model, train, public, ckpt_path=resume)
        if checkpoint is not None:
            trainer.save_checkpoint(checkpoint)
        assert private.engine is not None
        private.engine._ledger.close()
        return {
            "weights": flat(model),
            "asked": private.engine._ledger.spent.total(),
            "epsilon": private.guarantee().epsilon_if_noise_were_secret,
            "steps": private.engine._steps.step_number,
            "val_loss": float(trainer.callback_metrics["val_loss"]),
        }


@contextmanager
def environment(several: bool) -> Iterator[None]:
    """As torchrun sets it for a process of its own."""
    names = (
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
        "TORCHELASTIC_RUN_ID",
    )  # fmt: skip
    before = {name: os.environ.get(name) for name in names}
    if several:
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        values = (rank, rank, size, size, "127.0.0.1", 29511, 0, "test")
        os.environ.update(dict(zip(names, map(str, values), strict=True)))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
