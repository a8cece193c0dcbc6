"""Can reviews be passed on as made-up ones? IMDb: a classifier is trained on synthetic texts and tested on real ones.

usage: python bench/synthesize_imdb.py --data FOLDER --out FOLDER [--epsilons 8 none 1 3] [--seeds 3]
       [--first-seed N] [--samples N]
       [--lora R] [--epochs N] [--batch N] [--lr LR] [--guidance 0 2]
       [--sampling-batch N] [--prior-minutes M] [--minutes M] [--audit N]
       [--device cpu|cuda] [--smoke] [--judge [--remedies]]

One half of the reviews is public, without labels: a byte-level tokenizer and a model of GPT-2's shape are trained on
it. The other half, 24,791 labelled reviews, is private: `vestige synthesize` fine-tunes the model on it at each
epsilon, with labels as prompts and the counts of labels charged, and writes as many texts as asked. A linear classifier
of hashed words is trained on them and tested on 2,000 held-out real reviews. "none" is the same without privacy, by an
ordinary loop: the ceiling. Every run is verified. Of each generator texts are written with each --guidance (what is
drawn away from the other label; post-processing), the first of which is what the run leaves.

All texts are kept; --judge reads those of cells that were made where scikit-learn was missing, and makes no others.
--remedies tries what costs nothing: texts are kept only where classifiers of other texts agree with their label,
or are given the label that those say (five folds).
All cells, seed by seed and in the order of the epsilons, are written to FOLDER/results.json as they are made, and not
made again: call it again to go on. --minutes starts nothing later than that. --audit plants canaries in one more run at
the first epsilon, at the end. FOLDER of --data has imdb.jsonl.gz. Learning rates are fixed beforehand, not tuned on the
private half.
"""

from __future__ import annotations

import argparse
import json
import lzma
import shutil
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from finetuning import LABELS, SMOKE, WHOLE, Halves, Sizes, halves, token_loss, tokenizer_of
from vestige.finetuning.job import prepared
from vestige.finetuning.pretrained_models import quiet
from vestige.synthesis import quality
from vestige.synthesis.text_sampling import Drawing, sampled, without_repeats
from vestige.synthesis.texts import TextRun, TextSynthesis, tuning_of
from vestige.synthesis.texts_with_label_prompts import Prompts
from vestige.training.verify import verify

DIRECT = "directly, at epsilon 1: 79.3 by words; adapters of a classifier at 8, 3, 1: 82.0, 81.8, 80.3; without: 84.4"


def prior(known: Halves, sizes: Sizes, folder: Path, minutes: float, device: str) -> None:
    """A language model that has read the public half, without labels: windows of it, half of them from the beginning
    of a review on."""
    from transformers import GPT2Config, GPT2LMHeadModel

    if (folder / "config.json").exists():
        return
    begin, made = time.perf_counter(), folder.with_suffix(".new")
    tokenizer = tokenizer_of([text for text, _ in known.public], sizes)
    written = tokenizer([text for text, _ in known.public], add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    stream = torch.tensor([token for text in written for token in (end, *text)], device=device)
    stream = torch.cat([stream, stream[: sizes.length + 1]])
    starts = (stream[: -sizes.length - 1] == end).nonzero().flatten()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=sizes.length, n_embd=sizes.width, n_layer=sizes.layers,
        n_head=sizes.heads, bos_token_id=0, eos_token_id=0, pad_token_id=1, use_cache=False,
        resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    random = torch.Generator(device).manual_seed(0)
    places = torch.arange(sizes.length, device=device)
    seconds, step, loss = 60 * minutes, 0, torch.zeros(())
    while (share := (time.perf_counter() - begin) / seconds) < 1:
        anywhere = torch.randint(
            len(stream) - sizes.length, (sizes.public_batch // 2,), generator=random, device=device
        )
        first = starts[torch.randint(len(starts), (sizes.public_batch // 2,), generator=random, device=device)]
        tokens = stream[torch.cat([anywhere, first])[:, None] + places]
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 200) * max(0.02, 1 - share)
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device != "cpu"):
            loss = token_loss(model(input_ids=tokens), tokens).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
    print(
        f"prior: {step} steps of {sizes.public_batch} x {sizes.length} tokens in {seconds:.0f} s, loss {loss:.3f}",
        flush=True,
    )
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(model.config, name, 0.0)
    with quiet():
        model.eval().save_pretrained(made)
        tokenizer.save_pretrained(made)
    made.rename(folder)


def plain(job: TextSynthesis, seed: int) -> tuple[Any, float]:
    """The model fine-tuned without privacy, by as many steps of as many texts; and its seconds."""
    prompts: dict[str, Any] = {}

    def read(file: str, tokenizer: Any) -> Any:
        prompts["of"] = Prompts.of(tokenizer, job.labels)
        return prompts["of"].read(file, job.text_column, job.label_column, tokenizer, job.max_length)

    tuning = replace(tuning_of(job), seed=seed, epsilon=None, noise_multiplier=1.0)
    checkpoint, texts, _ = prepared(tuning, read)
    model, device = checkpoint.model, job.device
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=tuning.lr or 1e-3, weight_decay=0.0)
    random, begin = torch.Generator().manual_seed(seed), time.perf_counter()
    batch, part = tuning.batch or 256, int(job.physical_batch or 256)
    for _ in range((tuning.epochs or 1) * max(1, round(len(texts) / batch))):
        rows = torch.randint(len(texts), (batch,), generator=random)
        optimizer.zero_grad(set_to_none=True)
        for some in rows.split(part):
            items = [texts[int(row)] for row in some]
            held: dict[str, Tensor] = {
                name: torch.stack([each[name] for each in items]).to(device) for name in items[0]
            }
            labels = held.pop("labels")
            with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device != "cpu"):
                loss = token_loss(model(**held), labels).sum() / batch
            loss.backward()
        optimizer.step()
    return (checkpoint, prompts["of"]), time.perf_counter() - begin


def judge(found: dict[str, Any], folder: Path, tested: list[tuple[str, int]]) -> None:
    """Put the accuracies of a cell's texts into it, as far as they are not there."""
    if find_spec("sklearn") is None:
        return
    for file in sorted(_folder(found, folder).glob("texts-guidance-*.json.xz")):
        guidance = file.name.removeprefix("texts-guidance-").removesuffix(".json.xz")
        if guidance not in found["accuracy"]:
            kept = without_repeats([(label, text) for label, text in json.loads(lzma.decompress(file.read_bytes()))])
            texts, labels = [text for _, text in kept], [label for label, _ in kept]
            public, wanted = [text for text, _ in tested], [LABELS[label] for _, label in tested]
            found["accuracy"][guidance] = quality.text_accuracy(texts, labels, public, wanted)


def remedies(found: dict[str, Any], folder: Path, tested: list[tuple[str, int]]) -> None:
    """Accuracies where labels are held against classifiers of the other texts; nothing private is read."""
    from sklearn.model_selection import cross_val_predict

    public, wanted = [text for text, _ in tested], [LABELS[label] for _, label in tested]
    for file in sorted(_folder(found, folder).glob("texts-guidance-*.json.xz")):
        kept = without_repeats([(label, text) for label, text in json.loads(lzma.decompress(file.read_bytes()))])
        texts, labels = np.array([text for _, text in kept], dtype=object), np.array([label for label, _ in kept])
        said = cross_val_predict(quality.text_classifier(texts[:4], np.array(LABELS * 2)), texts, labels, cv=5)
        agree = said == labels
        found["agreement"], found["remedies"] = float(agree.mean()), {
            "texts that agree": quality.text_accuracy(list(texts[agree]), list(labels[agree]), public, wanted),
            "labels that others say": quality.text_accuracy(list(texts), list(said), public, wanted),
        }  # fmt: skip


def _folder(found: dict[str, Any], folder: Path) -> Path:
    return folder / f"epsilon-{found['epsilon']}-seed-{found['seed']}"


def keep(rows: Any, out: Path, guidance: float) -> None:
    packed = lzma.compress(json.dumps(rows).encode(), preset=3)
    (out / f"texts-guidance-{guidance:g}.json.xz").write_bytes(packed)


def rewritten(
    model: Any, tokenizer: Any, prompts: Prompts, drawing: Drawing, samples: int, folder: Path
) -> tuple[Any, float]:
    """Texts by a model that is there, half of each label, and the seconds that writing took."""
    begin, file = time.perf_counter(), folder / f"guidance-{drawing.guidance:g}.part"
    counts = {name: samples // len(LABELS) for name in LABELS}
    told = dict(zip(prompts.names, prompts.tokens, strict=True))
    rows = sampled(model, tokenizer, told, counts, drawing, file, lambda *told: True)
    file.unlink()
    return rows, time.perf_counter() - begin


def told(now: bool, what: str, begin: float) -> bool:
    if now:
        print(f"  {time.perf_counter() - begin:.0f} s: {what}", flush=True)
    return True


def cell(
    job: TextSynthesis, epsilon: str, seed: int, known: Halves, folder: Path, guidances: list[float]
) -> dict[str, Any]:
    """One generator, and the accuracy of what it writes, by guidance."""
    found: dict[str, Any] = {"epsilon": epsilon, "seed": seed, "accuracy": {}}
    out = _folder(found, folder)
    drawing = Drawing(job.max_length, batch=job.sampling_batch, seed=seed)
    if epsilon == "none":
        out.mkdir(parents=True, exist_ok=True)
        (checkpoint, prompts), found["training_seconds"] = plain(job, seed)
        todo = guidances
    else:
        run = TextRun(job, out, resume=(out / "run.json").exists())
        begin = trained = time.perf_counter()

        def on_record(record: Any) -> bool:
            nonlocal trained
            trained = time.perf_counter()
            return told(record.step % 20 == 0, f"step {record.step}", begin)

        made = run.complete(
            on_record,
            lambda count, of, pace: told(True, f"{count} of {of} texts", begin),
        )
        assert made is not None
        found |= {"verified_epsilon": verify(out).guarantee.epsilon, "quality": dict(made.quality), "texts": made.count}
        if trained > begin:  # else the generator was there, and its texts were not
            found["training_seconds"] = trained - begin
        keep(list(zip(made.rows["label"], made.rows["text"], strict=True)), out, guidances[0])
        checkpoint, prompts, todo = run.checkpoint, run.prompts, guidances[1:]
    for guidance in todo:
        chosen = replace(drawing, guidance=guidance)
        rows, seconds = rewritten(checkpoint.model, checkpoint.tokenizer, prompts, chosen, job.samples, out)
        found.setdefault("writing_seconds", {})[f"{guidance:g}"] = seconds
        keep(rows, out, guidance)
    steps = (job.epochs or 1) * max(1, round(len(known.private) / (job.batch or 1)))
    judge(found, folder, known.tested)
    if "training_seconds" in found:
        found["tokens_per_second_in_training"] = steps * (job.batch or 1) * job.max_length / found["training_seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epsilons", nargs="+", default=["8", "none", "1", "3"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=25_000)
    parser.add_argument("--lora", type=int, default=16, help="0: the whole model")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--part", type=int, default=512)
    parser.add_argument("--sampling-batch", type=int, default=2500)
    parser.add_argument("--guidance", type=float, nargs="+", default=[2.0, 0.0])
    parser.add_argument("--width", type=int, default=WHOLE.width)
    parser.add_argument("--layers", type=int, default=WHOLE.layers)
    parser.add_argument("--prior-minutes", type=float, default=2.0)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--audit", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--remedies", action="store_true")
    given = parser.parse_args()
    begin = time.perf_counter()
    sizes = replace(WHOLE, width=given.width, layers=given.layers, heads=given.width // 64, public_batch=256)
    if given.smoke:
        sizes = SMOKE
        given.samples, given.epochs, given.batch, given.part, given.prior_minutes = 30, 2, 40, 20, 0.05
    known = halves(given.data / "imdb.jsonl.gz", sizes)
    results = given.out / "results.json"
    found = json.loads(results.read_text()) if results.exists() else []
    if given.judge:
        for row in found:
            judge(row, given.out, known.tested)
            if given.remedies and "remedies" not in row:
                remedies(row, given.out, known.tested)
            results.write_text(json.dumps(found, indent=1))
        print(table(found))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    private = given.out / "private.jsonl"
    private.write_text("".join(json.dumps({"text": t, "label": LABELS[k]}) + "\n" for t, k in known.private))
    prior(known, sizes, given.out / "prior", given.prior_minutes, given.device)

    def job(epsilon: str, seed: int, **more: Any) -> TextSynthesis:
        settings: dict[str, Any] = {"samples": given.samples, "guidance": given.guidance[0], **more}
        return TextSynthesis(
            model=str(given.out / "prior"), data=str(private), label_column="label", labels=LABELS,
            epsilon=8.0 if epsilon == "none" else float(epsilon), delta=sizes.delta, max_length=sizes.length,
            lora=given.lora or None, batch=given.batch, epochs=given.epochs, lr=given.lr, physical_batch=given.part,
            sampling_batch=given.sampling_batch, seed=seed, device=given.device, bfloat16=given.device != "cpu",
            **settings,
        )  # fmt: skip

    cells = [
        (epsilon, seed)
        for seed in range(given.first_seed, given.first_seed + given.seeds)
        for epsilon in given.epsilons
    ]
    for epsilon, seed in cells:
        if any((row["epsilon"], row["seed"]) == (epsilon, seed) for row in found):
            continue
        if time.perf_counter() - begin > 60 * given.minutes:
            print("time is up: call it again to go on", flush=True)
            break
        found.append(cell(job(epsilon, seed), epsilon, seed, known, given.out, given.guidance))
        results.write_text(json.dumps(found, indent=1))
        print(json.dumps({key: value for key, value in found[-1].items() if key != "quality"}), flush=True)
    else:
        if given.audit:
            audited(job(given.epsilons[0], 0, samples=64, audit=given.audit, label_shares=(0.5, 0.5)), given.out)
    print(table(found))


def audited(job: TextSynthesis, folder: Path) -> None:
    """One more run, with canaries among its texts."""
    from vestige.audit.read_one_run_audit import read

    out = folder / "audit"
    shutil.rmtree(out, ignore_errors=True)
    TextRun(job, out).complete()
    for line in read(out).lines():
        print(line, flush=True)


def table(found: list[dict[str, Any]]) -> str:
    """Means over seeds, as Markdown."""
    lines = ["| epsilon | guidance | seeds | accuracy | training, s | tokens/s |", "|---|---|---|---|---|---|"]
    for epsilon in dict.fromkeys(row["epsilon"] for row in found):
        same = [row for row in found if row["epsilon"] == epsilon]
        for guidance in dict.fromkeys(key for row in same for key in row["accuracy"]):
            values = torch.tensor([100 * row["accuracy"][guidance] for row in same if guidance in row["accuracy"]])
            spread = f" ± {values.std():.1f}" if len(values) > 1 else ""
            taken = [row["training_seconds"] for row in same if "training_seconds" in row]
            paces = [row["tokens_per_second_in_training"] for row in same if "training_seconds" in row]
            cells = (
                epsilon, guidance, len(values), f"{values.mean():.1f}{spread}",
                f"{sum(taken) / len(taken):.0f}" if taken else "", f"{sum(paces) / len(paces):,.0f}" if paces else "",
            )  # fmt: skip
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", f"Beside it, on the same halves: {DIRECT}."])


if __name__ == "__main__":
    main()
