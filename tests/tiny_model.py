"""A random Qwen2 checkpoint of 0.8 MB with a byte-level BPE tokenizer trained here and a chat template. Nothing is downloaded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

_CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_model(folder: str | Path, seed: int = 0, vocab_size: int = 512, tied: bool = False) -> Path:
    """Write config, weights, generation config and tokenizer into `folder`; float32, two layers, hidden size 64, context 2048."""
    folder = Path(folder)
    tokenizer = _tokenizer(seed, vocab_size)
    tokenizer.save_pretrained(folder)
    tiny_qwen2(seed, vocab_size, tokenizer.eos_token_id, tokenizer.pad_token_id, tied).save_pretrained(folder)
    return folder


def tiny_qwen2(
    seed: int, vocab_size: int = 512, eos_token_id: int = 2, pad_token_id: int = 3, tied: bool = False
) -> Any:
    """The model alone; another seed has other weights of the same shapes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocab_size,
            hidden_size=64,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tie_word_embeddings=tied,
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            dtype="float32",
        )
    )
    model.generation_config.eos_token_id = [
        eos_token_id,
        7,
    ]  # a list, as Qwen2.5 and Llama 3 have; 7 is an ordinary token
    model.generation_config.pad_token_id = pad_token_id
    return model.eval()


def _tokenizer(seed: int, vocab_size: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(unk_token=None))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    pairs = [(rng.randint(0, 999), rng.randint(0, 999)) for _ in range(2000)]
    bpe.train_from_iterator(
        (f"Q: what is {a} + {b}? A: let us think. {a} + {b} = {a + b}. The answer is {a + b}." for a, b in pairs),
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|pad|>", bos_token=None
    )
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer
