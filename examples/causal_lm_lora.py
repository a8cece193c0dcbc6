"""A private LoRA adapter of a causal language model, saved, verified and used.

python examples/causal_lm_lora.py my-adapter
"""

import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from vestige.integrations.huggingface import PrivacyArguments, PrivateTrainer
from vestige.training.verify import verify


def base() -> LlamaForCausalLM:
    """Stands for LlamaForCausalLM.from_pretrained(...)."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return LlamaForCausalLM(LlamaConfig(vocab_size=100, bos_token_id=0, eos_token_id=1, pad_token_id=0, **sizes))


def main(folder: str) -> None:
    texts = (torch.arange(12) + torch.randint(80, (500, 1))) % 90 + 5  # each counts upward from somewhere
    model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    trainer = PrivateTrainer(
        model=model,
        args=TrainingArguments(folder, per_device_train_batch_size=50, num_train_epochs=2, learning_rate=1e-2),
        privacy_args=PrivacyArguments(target_epsilon=3, target_delta=1e-4, max_grad_norm=1.0),
        train_dataset=[{"input_ids": text, "labels": text} for text in texts],
    )
    trainer.train()
    trainer.save_model()
    print(f"verified: epsilon {verify(folder).guarantee.epsilon:.3f}")
    adapter = PeftModel.from_pretrained(base(), folder).eval()
    print(adapter.generate(input_ids=texts[:1, :4], max_new_tokens=4, do_sample=False).tolist())


if __name__ == "__main__":
    main(sys.argv[1])
