"""Owns what tests share: a byte-level tokenizer with a ChatML template, tiny random Llama models, a target directory.

Everything is built in memory and offline. Use the factories from a test by `from conftest import make_tiny_llama`.
"""

import gc
import os

os.environ.update(HF_HUB_OFFLINE="1", WANDB_MODE="disabled", TOKENIZERS_PARALLELISM="false")

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings, many times so beside other tests


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What a test starts may take all cores; the tests after it do not."""
    yield
    torch.set_num_threads(1)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r"), ("a", "n"), ("Ċ", "Ċ"), ("Ġ", "a"), ("o", "n")]


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: 256 bytes, 9 merges, 3 special tokens (268 ids); pad and bos <|endoftext|>, eos <|im_end|>."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )


def make_tiny_llama(vocab_size: int, layers: int = 2, hidden: int = 32, seed: int = 0) -> LlamaForCausalLM:
    """A random fp32 Llama in eval mode. Weights are wide enough that greedy choices are no near-ties."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays to the end: each search for garbage would take a quarter of a second on it


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Shared and read only: build your own by `make_tiny_tokenizer` to change it."""
    return make_tiny_tokenizer()


@pytest.fixture
def tiny_model(tiny_tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A fresh tiny Llama over the tokenizer's 268 ids."""
    return make_tiny_llama(len(tiny_tokenizer))


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast) -> Path:
    """A Hugging Face directory with the tiny model, its tokenizer and a generation config. Read only."""
    directory = tmp_path_factory.mktemp("target") / "tiny-target"
    model = make_tiny_llama(len(tiny_tokenizer))
    model.config.eos_token_id = tiny_tokenizer.eos_token_id
    model.config.pad_token_id = tiny_tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        eos_token_id=[tiny_tokenizer.eos_token_id, tiny_tokenizer.convert_tokens_to_ids("<|endoftext|>")],
        pad_token_id=tiny_tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    tiny_tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def bound_by_permissions() -> Iterator[None]:
    """Root is not: it acts as nobody meanwhile."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)
