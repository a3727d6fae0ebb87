"""A tiny chat model as a Hugging Face folder."""

from pathlib import Path

import torch
from support.chat.tokenizers import FAMILIES, chat_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM


def chat_model_folder(folder: Path, family: str = "chatml", context: int = 2048, hidden_size: int = 16) -> Path:
    """A random Llama with the tokenizer of `family`, saved to `folder`."""
    tokenizer = chat_tokenizer(FAMILIES[family])
    torch.manual_seed(0)
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
