"""Which checkpoints are fine-tuned in tests? Tiny ones, made here and saved as local folders."""

import json

import torch


def words(number):
    """The text of a row: good ones and bad ones differ in their words, and in length."""
    kind = ("dull", "bright")[number % 2]
    return f"a {kind} film, " + "truly " * (number % 5) + kind


def tokenizer(**special):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>", "<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator([words(number) for number in range(20)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", model_max_length=32, **special)


def checkpoint(folder, kind="GPT2LMHeadModel", pad=True, **settings):
    """A folder with a tiny model and its tokenizer, as Hugging Face saves them."""
    import transformers

    torch.manual_seed(0)
    texts = tokenizer(**({"pad_token": "<pad>"} if pad else {}))
    if kind.startswith("GPT2"):
        shape = {"vocab_size": len(texts), "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
        config = transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0, **settings)
    else:
        shape = {"vocab_size": len(texts), "max_position_embeddings": 32, "hidden_size": 16, "num_hidden_layers": 2}
        shape |= {"num_attention_heads": 2, "intermediate_size": 24, "pad_token_id": 1}
        config = transformers.BertConfig(**shape, **settings)
    getattr(transformers, kind)(config).save_pretrained(folder)
    texts.save_pretrained(folder)
    return folder


def rows(file, count=40, **changes):
    """A file of so many rows, with `text` and `label`."""
    made = [{"text": words(number), "label": ("neg", "pos")[number % 2], **changes} for number in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in made))
    return file
