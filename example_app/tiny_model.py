"""Owns the demonstration's model: random weights and a real tokenizer, a few MB, made here, never downloaded.

Its answers are gibberish. What it is for is real: llama.cpp tokenizes prompts with it, keeps their KV cache.
The same Python makes the same file, byte for byte: the weights come from a fixed seed, and the tokenizer
learns from the standard library's own sources.
"""

from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, LlamaFileType, TokenType
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

RECIPE = 1  # part of the file's name: raise it when anything below changes, and nobody runs a stale model

VOCABULARY = 2048
CONTEXT = 32768
HIDDEN = 128
LAYERS = 2
HEADS = 2
FEED_FORWARD = 256

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # in this order: a token's id is its place
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ensure_tiny_model(folder: Path) -> Path:
    """Return the model's GGUF file in `folder`, making both when they are missing (a second or two)."""
    path = folder / f"tiny-{RECIPE}.gguf"
    if path.exists():
        return path

    folder.mkdir(parents=True, exist_ok=True)
    # Written under another name and renamed when complete: a run that is interrupted leaves no broken model,
    # and two runs at once do not write into each other's file.
    unfinished = path.with_suffix(f".{os.getpid()}.part")
    try:
        _write_model(unfinished, _train_tokenizer())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

    return path


def _train_tokenizer() -> Tokenizer:
    """Byte-level BPE, like GPT-2's: every text has tokens, and code has few of them."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(source) for source in sources], trainer)
    return tokenizer


def _write_model(path: Path, tokenizer: Tokenizer) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny-random")
    writer.add_file_type(LlamaFileType.ALL_F32)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer, tokenizer)
    _add_weights(writer, tokenizer.get_vocab_size())

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: GGUFWriter, tokenizer: Tokenizer) -> None:
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges: list[list[str]] = json.loads(tokenizer.to_str())["model"]["merges"]

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_vocab_size(len(tokens))
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(SPECIAL_TOKENS.index("<|im_end|>"))
    writer.add_pad_token_id(SPECIAL_TOKENS.index("<|endoftext|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add_weights(writer: GGUFWriter, vocabulary: int) -> None:
    rng = np.random.default_rng(seed=7)

    def add(name: str, *shape: int, scale: float) -> None:
        writer.add_tensor(f"{name}.weight", scale * rng.standard_normal(shape, dtype=np.float32))

    def add_norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

    # With these scales the next token depends on the prompt and not on rounding.
    add("token_embd", vocabulary, HIDDEN, scale=0.02)
    add_norm("output_norm")
    add("output", vocabulary, HIDDEN, scale=0.4)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add_norm(f"{block}.attn_norm")
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"{block}.{part}", HIDDEN, HIDDEN, scale=0.16)
        add_norm(f"{block}.ffn_norm")
        add(f"{block}.ffn_gate", FEED_FORWARD, HIDDEN, scale=0.08)
        add(f"{block}.ffn_up", FEED_FORWARD, HIDDEN, scale=0.08)
        add(f"{block}.ffn_down", HIDDEN, FEED_FORWARD, scale=0.08)
