"""Owns what a model card says of use: the line for each engine, what cannot serve it, and a script that loads it.

The lines are for a reader who has the drafter's directory and nothing else: DRAFTER and TARGET stand for both paths.
Engines: vLLM 0.32.0 and transformers 5 were run; SGLang 0.5.23 and TGI at db931fcf were read.
"""

from specdist.drafter_config import HEAD_KINDS, MEDUSA
from specdist.export_record import ExportRecord

_ASSISTED = """from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("TARGET")
target = AutoModelForCausalLM.from_pretrained("TARGET")
draft = AutoModelForCausalLM.from_pretrained("DRAFTER", dtype=target.dtype)
chat = [{"role": "user", "content": "Why is the sky blue?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
output = target.generate(**inputs, assistant_model=draft, do_sample=False, max_new_tokens=64)  # batch size 1
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))"""

_DRAFT_MODEL = (
    "from specdist.drafters.causal_lm import DraftModelDrafter, load_for_drafting",
    'drafter = DraftModelDrafter(*load_for_drafting(Path("DRAFTER"), target, model.dtype))',
)
_HEADS = (
    """from specdist.drafters.heads import HeadsOnTarget, TargetEnds
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.drafters.heads_file import heads_file, load_heads""",
    """heads = load_heads(heads_file(Path("DRAFTER")), target.identity.vocab_size)
drafter = HeadsDrafter(HeadsOnTarget(heads, TargetEnds.of(model)))""",
)
_DECODE = """from pathlib import Path

import torch

from specdist.decoding.loop import decode
{imports}
from specdist.export_record import read_record
from specdist.schema import SamplingSpec
from specdist.target import open_target

record = read_record(Path("DRAFTER"))  # raises where a file is not the one that was exported
target = open_target("TARGET")
assert target.identity.weights_sha256 == record.target.weights_sha256, "another target"
model = {model}.load_model(torch.float32)
{drafter}
chat = [{{"role": "user", "content": "Why is the sky blue?"}}]
prompt = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
sampling, eos = SamplingSpec(temperature=0.0, max_new_tokens=64), target.identity.eos_token_ids
result = decode(model, prompt, sampling, eos, drafter=drafter, num_speculative_tokens={gamma})
accepted = sum(step.accepted for step in result.steps)
print(target.tokenizer.decode(result.completion_ids))
print(f"tau = {{1 + accepted / len(result.steps):.2f}} tokens per step of the target")"""

_CHANGED_IMPORT = "from specdist.drafters.adapted_target import adapted_target"
_CHANGED_TARGET = 'adapted_target(target, Path("DRAFTER") / "adapter")'
_MERGED = (
    "TARGET below is the target with `adapter/` merged into it: load both with PEFT, `merge_and_unload()`, save the "
    "result (first of the known limits)."
)


def serving(record: ExportRecord) -> list[str]:
    """Lines of Markdown: how each engine that can serve the export is started."""
    command = record.vllm_command("TARGET", "DRAFTER")
    if command is None:
        return ["No engine reads these heads. They run in specdist's own decoder, as below."]
    vllm = _block("bash", command, "vLLM")
    if record.drafter_kind == MEDUSA:
        merged = [] if record.lossless else [_MERGED, ""]
        return [*merged, *vllm, "", *_tgi()]
    return [*vllm, "", *_sglang(_gamma(record)), "", *_block("python", _ASSISTED, "transformers")]


def _gamma(record: ExportRecord) -> int:
    return int(record.speculative_config.get("num_speculative_tokens", 1))


def _sglang(gamma: int) -> list[str]:
    command = (
        "python -m sglang.launch_server --model-path TARGET --speculative-algorithm STANDALONE \\\n"
        f"    --speculative-draft-model-path DRAFTER --speculative-num-steps {gamma} --speculative-eagle-topk 1 \\\n"
        f"    --speculative-num-draft-tokens {gamma + 1}"
    )
    return _block("bash", command, "SGLang (read in source, not run)")


def _tgi() -> list[str]:
    command = "specdist export --format tgi DRAFTER OUTPUT --target TARGET   # or --format original"
    return _block("bash", command, "TGI and the original Medusa read other layouts of the same heads")


def _block(language: str, text: str, title: str) -> list[str]:
    return [f"{title}:", "", f"```{language}", text, "```"]


def limits(record: ExportRecord) -> list[str]:
    """What is known not to work, or to work worse: the export's own list, then engines that cannot serve it."""
    if record.drafter_kind in HEAD_KINDS:
        engines = "SGLang and TensorRT-LLM have no Medusa, and transformers reads no heads as an assistant"
    else:
        engines = "TGI reads no draft model, only heads"
    measured = "Acceptance was measured on the prompts above: on other domains, languages or prompt formats it differs"
    speed = "Speed depends on hardware and batch size: with large batches drafting gains less, or nothing"
    return [f"{limit}." for limit in (*record.known_limits, engines, measured, speed)]


def measuring(record: ExportRecord) -> list[str]:
    """Lines of Markdown: a script that checks, loads and runs the export in specdist, and the command that compares."""
    imports, drafter = _HEADS if record.drafter_kind in HEAD_KINDS else _DRAFT_MODEL
    model = "target"
    if not record.lossless:
        imports, model = f"{_CHANGED_IMPORT}\n{imports}", _CHANGED_TARGET
    script = _DECODE.format(imports=imports, drafter=drafter, model=model, gamma=_gamma(record))
    return [
        *_block("python", script, "With specdist installed"),
        "",
        "`report.json` and `report.html` beside this file hold all counts; `specdist compare DRAFTER OTHER` puts two "
        "such directories side by side, with intervals.",
    ]
