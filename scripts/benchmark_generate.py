"""Measures greedy answers by the embedded engine against a plain fixed-batch loop, with caches of as many tokens."""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdist.generation.engine import Request
from specdist.generation.hf import TransformersEngine
from specdist.schema import SamplingSpec
from specdist.stages.process import keep_freed_memory
from specdist.target import Target, open_target

Texts = list[list[int]]  # token ids of each prompt, or of each answer


def read_prompts(path: Path, limit: int, longest: int, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """Token ids of the first single-turn conversations, up to `longest`, of a JSONL file or a directory's files."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    rows = (json.loads(line)["messages"] for file in files for line in file.read_text().splitlines())
    single = (messages for messages in rows if [m["role"] for m in messages].count("user") == 1)
    rendered = (tokenizer.apply_chat_template(m, add_generation_prompt=True, return_dict=True) for m in single)
    return list(itertools.islice((r["input_ids"] for r in rendered if len(r["input_ids"]) <= longest), limit))


def packed(prompts: Texts, args: argparse.Namespace) -> list[Texts]:
    """Batches of prompts, longest first, each as large as the cache allows."""
    batches: list[Texts] = [[]]
    for prompt in prompts:
        width = len((batches[-1] or [prompt])[0]) + args.max_new_tokens
        if len(batches[-1]) >= min(args.max_batch_tokens // width, args.max_batch_rows):
            batches.append([])
        batches[-1].append(prompt)
    return batches


def plain_loop(model: PreTrainedModel, batches: list[Texts], new: int, stop: list[int]) -> Texts:
    """One batch after the other through `model.generate`, padded to the left."""
    answers: Texts = []
    for batch in batches:
        width = max(map(len, batch))
        ids = torch.tensor([[stop[0]] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=stop, pad_token_id=stop[0])
        for row in model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist():
            answers.append(row[: next((i + 1 for i, token in enumerate(row) if token in stop), len(row))])
    return answers


def engine_loop(model: PreTrainedModel, prompts: Texts, args: argparse.Namespace, stop: list[int]) -> Texts:
    """The embedded engine, with prompts longest first as the data stage gives them."""
    engine = TransformersEngine(
        model, eos_token_ids=stop, pad_token_id=stop[0],
        max_batch_rows=args.max_batch_rows, max_batch_tokens=args.max_batch_tokens,
    )  # fmt: skip
    sampling = SamplingSpec(max_new_tokens=args.max_new_tokens)
    requests = iter([Request(str(i), prompt, sampling, 0) for i, prompt in enumerate(prompts)])
    answers = {int(a.request.key): a.completion_ids for a in engine.answers(lambda: next(requests, None))}
    return [answers[i] for i in range(len(prompts))]


VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB, where there is no GPU
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads bound to cores stall each other where something else runs too
}
VLLM_SCRIPT = """
import json, sys, time
from vllm import LLM, SamplingParams
job = json.load(open(sys.argv[1]))
llm = LLM(job["target"], skip_tokenizer_init=True, dtype=job["dtype"], max_num_seqs=job["rows"],
          max_model_len=job["length"], enable_prefix_caching=False)
params = SamplingParams(temperature=0.0, max_tokens=job["new"], stop_token_ids=job["stop"], detokenize=False)
began = time.perf_counter()
outputs = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], params)
answers = [list(o.outputs[0].token_ids) for o in outputs]
json.dump({"seconds": time.perf_counter() - began, "answers": answers}, open(sys.argv[2], "w"))
"""


def vllm_loop(target: Target, prompts: Texts, args: argparse.Namespace) -> tuple[Texts, float]:
    """The same prompts through vLLM in a Python environment of its own: answers and seconds without loading."""
    job = {
        "target": str(target.path.resolve()),
        "dtype": args.dtype,
        "rows": args.max_batch_rows,
        "length": max(map(len, prompts)) + args.max_new_tokens,
        "new": args.max_new_tokens,
        "stop": target.identity.eos_token_ids,
        "prompts": prompts,
    }
    with tempfile.TemporaryDirectory() as directory:
        question, result = Path(directory, "job.json"), Path(directory, "answers.json")
        question.write_text(json.dumps(job))
        command = [args.vllm_python, "-c", VLLM_SCRIPT, question, result]
        subprocess.run(command, check=True, cwd=directory, env=VLLM_ENVIRONMENT | os.environ)
        answer = json.loads(result.read_text())
    return answer["answers"], answer["seconds"]


def run(args: argparse.Namespace) -> None:
    """Print each way's rate and how many of its answers are those of the plain loop in the given order."""
    if "vllm" in args.beside and not args.vllm_python:
        sys.exit("--beside vllm: name a Python that has vLLM by --vllm-python, for example .venv-vllm/bin/python")
    keep_freed_memory()  # for all, as in a run
    if args.threads:
        torch.set_num_threads(args.threads)
    target = open_target(args.target)
    model = target.load_model(getattr(torch, args.dtype))
    stop = target.identity.eos_token_ids
    prompts = read_prompts(args.prompts, args.num_prompts, args.max_prompt_tokens, target.tokenizer)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    sorted_prompts = [prompts[i] for i in order]
    size = max(1, args.max_batch_tokens // (len(sorted_prompts[0]) + args.max_new_tokens))
    given = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    print(f"{len(prompts)} prompts of {len(sorted_prompts[-1])} to {len(sorted_prompts[0])} tokens, {args.dtype}")

    def measured(run: Callable[[], Texts]) -> tuple[Texts, float]:
        began = time.perf_counter()
        return run(), time.perf_counter() - began

    plain_loop(model, [prompts[:1]], 2, stop)  # the first pass reads the weights from disk
    plain, seconds = measured(lambda: plain_loop(model, given, args.max_new_tokens, stop))
    rate = sum(map(len, plain)) / seconds
    print(f"plain loop, {size} rows in the given order: {seconds:.1f} s, {rate:.1f} tokens/s", flush=True)
    reference = [plain[i] for i in order]
    others: dict[str, Callable[[], tuple[Texts, float]]] = {
        "engine": lambda: measured(lambda: engine_loop(model, sorted_prompts, args, stop)),
        "packed": lambda: measured(lambda: plain_loop(model, packed(sorted_prompts, args), args.max_new_tokens, stop)),
        "vllm": lambda: vllm_loop(target, sorted_prompts, args),
    }
    for name in args.beside:
        answers, seconds = others[name]()
        tokens = sum(map(len, answers))
        same = sum(map(list.__eq__, answers, reference))
        print(
            f"{name}: {seconds:.1f} s, {tokens / seconds:.1f} tokens/s, {tokens / seconds / rate:.2f} times the plain "
            f"loop, {same} of {len(prompts)} answers identical",
            flush=True,
        )


def main(arguments: list[str]) -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser("benchmark.py generate", description=__doc__)
    add = parser.add_argument
    add("--target", default="smollm2-135m", help="demo's name, directory or Hugging Face id")
    add("--prompts", type=Path, default=Path("data/prompts/train"), help="JSONL file or directory")
    add("--num-prompts", type=int, default=400)
    add("--max-prompt-tokens", type=int, default=512, help="longer ones are left out")
    add("--max-new-tokens", type=int, default=128)
    add("--max-batch-tokens", type=int, default=16384, help="tokens in the cache, for both")
    add("--max-batch-rows", type=int, default=64, help="of the engine and of vLLM")
    add("--dtype", default="float32")
    add("--threads", type=int, help="of the CPU; default: torch's")
    add(
        "--beside", nargs="+", default=["engine", "packed"], choices=["engine", "packed", "vllm"],
        help="what runs beside the plain loop; packed: the plain loop with prompts sorted and packed",
    )  # fmt: skip
    add("--vllm-python", help="for vllm: Python of an environment that has it")
    run(parser.parse_args(arguments))
