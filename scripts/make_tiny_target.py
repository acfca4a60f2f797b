"""Makes a tiny target model for trials and CI: a random Llama with a byte-level ChatML tokenizer, in seconds, offline.

    python scripts/make_tiny_target.py DIRECTORY        writes DIRECTORY/target, an ordinary Hugging Face directory

The weights come from a seed, so the same versions give the same model. Its text means nothing, but it can be learned:
embeddings outweigh what attention adds, so the next token depends mostly on the last one, and a sharp output
projection makes greedy choices clear.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdist.provenance import atomic_directory

SEED = 1
SHARPNESS = 8.0  # length of a row of the output projection; a hidden state has length 8
NUM_ENDERS = 12  # tokens that make the end of the text likely: most short answers stop, some reach a limit of 64
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One id for each of the 256 bytes and the three special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([PAD, START, END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=START,
        eos_token=END,
        pad_token=PAD,
        model_max_length=2048,
        chat_template=CHATML,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Four layers of width 64 in float32."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,  # of size 32, the smallest that vLLM runs on a CPU
        num_key_value_heads=1,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        embeddings, projection = model.model.embed_tokens.weight, model.lm_head.weight  # [V, D], [V, D]
        embeddings.normal_()
        projection.normal_(std=SHARPNESS / config.hidden_size**0.5)
        end = embeddings[torch.randperm(256)[:NUM_ENDERS]].sum(0)  # [D]
        projection[tokenizer.eos_token_id] = 1.5 * SHARPNESS * end / end.norm()
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    return model


def main() -> None:
    """Write the target below the directory given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="the target is written to DIRECTORY/target")
    target = parser.parse_args().directory / "target"
    tokenizer = make_tokenizer()
    with atomic_directory(target) as directory:
        make_model(tokenizer).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
    print(f"tiny target: {target}")


if __name__ == "__main__":
    main()
