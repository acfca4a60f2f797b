"""Owns low-rank adapters (LoRA, Hu et al. 2021) on a causal LM: adding, checking, saving, reading and merging them.

A checkpoint holds the adapters alone (PEFT's files) and the vocabulary size of the base that they were trained on. The
base is the run's initial draft, or the target where heads change it (Medusa-2), and is given explicitly, so that a
checkpoint names no path of a machine.
"""

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModelForCausalLM, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

from specdist import provenance
from specdist.drafter_config import DraftArguments, HeadsArguments, TrainedSize
from specdist.errors import ArtifactError, ConfigError
from specdist.record import Record

logger = logging.getLogger(__name__)

ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_BASE = "adapter_config.json", "adapter_model.safetensors", "adapter_base.json"
PARITY = 1e-5  # of the largest logit; in fp32 a merge moves it by about a tenth of that
_PARITY_TOKENS = 64
_ALL_LINEAR = "all-linear"


@dataclass(frozen=True)
class AdapterBase(Record):
    """What a base must have to carry the adapters of a checkpoint: rows of its vocabulary."""

    vocab_size: int


class Adapted(PeftModelForCausalLM):
    """PEFT's model, whose checkpoints say which vocabulary size they belong to and hold no tensor of the base."""

    def save_pretrained(self, save_directory: str, *arguments: Any, **options: Any) -> None:
        super().save_pretrained(save_directory, *arguments, **{**options, "save_embedding_layers": False})
        if options.get("is_main_process", True):
            config = Path(save_directory) / ADAPTER_CONFIG
            values = provenance.read_json(config)
            modules = values["target_modules"]  # which PEFT writes in the order of a set, another in each process
            provenance.write_json(config, values | {"target_modules": sorted(modules)})
            provenance.write_json(Path(save_directory) / ADAPTER_BASE, AdapterBase(_num_rows(self)).to_json())

    def create_or_update_model_card(self, output_dir: str) -> None:
        """Write none: PEFT's names the path of the base on this machine."""


def _num_rows(model: nn.Module) -> int:
    return int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator] # both kinds of model have it


def check_adapters(base: PreTrainedModel, arguments: DraftArguments) -> None:
    """Check that the adapters of `arguments` fit `base` (which may be on the meta device) and this machine.

    Raises ConfigError on a module that the base lacks, on the embeddings and the output projection, and where 4 bits
    need a GPU or a package that is not there.
    """
    if not arguments.lora_rank:
        return
    for wanted in arguments.lora_target_modules:
        found = [m for name, m in base.named_modules() if name == wanted or name.endswith(f".{wanted}")]
        if wanted != _ALL_LINEAR and not found:
            names = sorted({n.split(".")[-1] for n, m in base.named_modules() if isinstance(m, nn.Linear)})
            raise ConfigError(f"lora_target_modules: the draft has no {wanted!r}; expected {_ALL_LINEAR} or of {names}")
        if {base.get_input_embeddings(), base.get_output_embeddings()} & set(found):
            raise ConfigError(
                f"lora_target_modules: {wanted!r} is the embeddings or the output projection, which training reads "
                "as they are; leave it out"
            )
    if arguments.load_in_4bit:
        check_4bit()


def check_4bit() -> None:
    """Raise ConfigError where this machine cannot hold a base in 4 bits."""
    if not torch.cuda.is_available():
        raise ConfigError("load_in_4bit: needs a CUDA GPU and this machine has none; set load_in_4bit: false")
    if find_spec("bitsandbytes") is None:
        raise ConfigError("load_in_4bit: bitsandbytes is not installed; pip install bitsandbytes")


def _with_adapters(base: PreTrainedModel, seed: int, **options: Any) -> Adapted:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Adapted(base, LoraConfig(task_type="CAUSAL_LM", **options))


def add_adapters(base: PreTrainedModel, arguments: DraftArguments, *, seed: int) -> Adapted:
    """`base` with fresh adapters, which alone are trained and at first change nothing. Raises as `check_adapters`."""
    check_adapters(base, arguments)
    modules = arguments.lora_target_modules
    return _with_adapters(
        base,
        seed,
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=_ALL_LINEAR if modules == [_ALL_LINEAR] else modules,
        base_model_name_or_path="../../init",  # from a checkpoint of a run
    )


def trained_size(base: PreTrainedModel, arguments: DraftArguments) -> TrainedSize:
    """The size of what is trained of `base`, which is on the meta device. Raises as `check_adapters`."""
    total = base.num_parameters()
    if not arguments.lora_rank:
        return TrainedSize.whole(total)
    linear = [m.weight for m in base.modules() if isinstance(m, nn.Linear) and m is not base.get_output_embeddings()]
    four_bit = sum(weight.numel() for weight in linear) if arguments.load_in_4bit else 0
    with torch.device("meta"):
        adapted = add_adapters(base, arguments, seed=0)
    learned = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    return TrainedSize(total, learned, 4 * (total - four_bit + learned) + four_bit // 2)


def add_target_adapters(target: PreTrainedModel, arguments: HeadsArguments, name: str, *, seed: int) -> Adapted:
    """A target called `name` with fresh adapters at all linear layers but the output projection, which heads share."""
    return _with_adapters(
        target,
        seed,
        r=arguments.target_lora_rank,
        lora_alpha=arguments.target_lora_alpha,
        target_modules=_ALL_LINEAR,
        base_model_name_or_path=name,
    )


def load_adapter(base: PreTrainedModel, directory: Path) -> Adapted:
    """`base` with the adapters of a checkpoint. Raises ArtifactError where they belong to another base or are cut."""
    record = AdapterBase.from_json(provenance.read_json(directory / ADAPTER_BASE), str(directory / ADAPTER_BASE))
    if (rows := _num_rows(base)) != record.vocab_size:
        raise ArtifactError(
            f"{directory}: its adapters were trained on a base with {record.vocab_size} vocabulary rows, this one has "
            f"{rows}; resize the base first (resize_token_embeddings({record.vocab_size})), or give the run's own init"
        )
    model = Adapted(base, LoraConfig.from_pretrained(str(directory)))
    read_adapters(model, directory)
    return model.eval()


def read_adapters(model: Adapted, directory: Path) -> None:
    """Give `model` the values of the adapters in `directory`. Raises ArtifactError where they are others, or cut."""
    try:
        tensors = load_file(directory / ADAPTER_WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{directory / ADAPTER_WEIGHTS}: cannot be read ({error}); missing or cut") from error
    wanted = get_peft_model_state_dict(model, save_embedding_layers=False)
    expected = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(n for n in expected | found if expected.get(n) != found.get(n))
        raise ArtifactError(f"{directory / ADAPTER_WEIGHTS}: not the adapters of this base; wrong: {wrong[:4]}")
    set_peft_model_state_dict(model, tensors)


@torch.no_grad()
def merge_adapter(model: Adapted) -> PreTrainedModel:
    """The base of `model` with its adapters added into the weights; `model` is used up.

    Raises ArtifactError where a logit of the merged model differs from the adapters' by more than `PARITY` of the
    largest one, on fixed random tokens: the merge is broken, or was done in a dtype that cannot hold it.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, _num_rows(model), (1, _PARITY_TOKENS), generator=generator).to(model.device)
    expected = model(input_ids=ids, use_cache=False).logits.float()  # [1, T, V]
    merged: PreTrainedModel = model.merge_and_unload()
    difference = float((merged(input_ids=ids, use_cache=False).logits.float() - expected).abs().max())
    largest = float(expected.abs().max())
    if not difference <= PARITY * largest:  # also where one is not a number
        raise ArtifactError(
            f"adapters: the merged model's logits differ by {difference:.2e} from theirs, whose largest is "
            f"{largest:.2f}; expected at most {PARITY:g} of that. Merge in float32, and check the checkpoint"
        )
    logger.info("adapters merged: logits differ by %.1e at most, of %.1f", difference, largest)
    return merged
