"""A small GPT-2 in a plain loop, privately: `model(**batch).loss` becomes the mean of the examples' own losses.

usage: python examples/hf_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import vestige

pixels = torch.tensor(load_digits().data[:600, 16:40], dtype=torch.long)  # a language with 17 shades of grey for words
rows = [{"input_ids": row, "labels": row} for row in pixels]

torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=17, n_positions=24, n_embd=32, n_layer=1, n_head=2, bos_token_id=16, eos_token_id=16)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

engine = vestige.PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model.train(), optimizer=optimizer, data_loader=DataLoader(rows, batch_size=60),
    target_epsilon=8.0, target_delta=1e-4, epochs=3, max_grad_norm=1.0,
)  # fmt: skip
for _ in range(3):
    for batch in loader:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()

print(model.generate(pixels[:1, :4], max_new_tokens=8, do_sample=False, pad_token_id=16).tolist())
print(f"epsilon {engine.get_epsilon(delta=1e-4):.2f}")
