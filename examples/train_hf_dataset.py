"""A small BERT on a Hugging Face dataset, privately, with `vestige.train`: columns go to the model by their names.

usage: python examples/train_hf_dataset.py
"""

import torch
from datasets import Dataset
from sklearn.datasets import load_digits
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import vestige

digits = load_digits()
rows = {"input_ids": digits.data[:600, 16:48].astype(int).tolist(), "labels": digits.target[:600].tolist()}
dataset = Dataset.from_dict(rows)  # 17 shades of grey for words; any map-style dataset will do

torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=17, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
)  # fmt: skip

training = vestige.train(
    model, torch.nn.functional.cross_entropy, dataset, method="dp-adamw",
    epsilon=8.0, delta=1e-4, sample_rate=60 / len(dataset), steps=20, lr=2e-3,
    lr_scheduler=lambda optimizer: get_linear_schedule_with_warmup(optimizer, 2, 20),
)  # fmt: skip
for record in training:
    if record.step % 5 == 4:
        print(f"step {record.step + 1}: epsilon {record.epsilon:.2f}")
print(f"epsilon {training.guarantee().epsilon:.2f}")
