"""A private classifier with a Hugging Face Trainer: the same script as without privacy, and `privacy_args`.

python examples/trainer.py --output_dir my-run --target_epsilon 3 --target_delta 1e-4 --lr auto
vestige verify my-run
"""

import torch
from transformers import BertConfig, BertForSequenceClassification, HfArgumentParser, TrainingArguments

from vestige.integrations.huggingface import PrivacyArguments, PrivateTrainer


def sentences(rows: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Stands for a tokenized dataset: a sentence is of class 1 where it has one of the tokens below 10."""
    ids = torch.randint(2, 100, (rows, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": each, "labels": (each < 10).any().long()} for each in ids]


def main() -> None:
    parser = HfArgumentParser((TrainingArguments, PrivacyArguments))
    args, privacy = parser.parse_args_into_dataclasses()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=12, num_labels=2, **sizes))
    trainer = PrivateTrainer(
        model=model, args=args, privacy_args=privacy, train_dataset=sentences(2000, 0), eval_dataset=sentences(500, 1)
    )
    trainer.train()
    trainer.save_model()
    print(f"loss on public data {trainer.evaluate()['eval_loss']:.3f} at epsilon {trainer.guarantee().epsilon:.3f}")


if __name__ == "__main__":
    main()
