"""Measures parts of specdist on this machine; each figure is a ratio or a peak from one run.

python scripts/benchmark.py generate --help     the embedded engine against a plain fixed-batch loop
python scripts/benchmark.py prompts --help      reading, validating, deduplicating and splitting a million prompts
"""

import argparse
import itertools
import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from specdist.dataset.prepare import PromptMix, prepare_prompts
from specdist.generation.engine import Request
from specdist.generation.hf import TransformersEngine
from specdist.schema import SamplingSpec
from specdist.stages.process import keep_freed_memory
from specdist.target import Target, open_target

Texts = list[list[int]]  # token ids of each prompt, or of each answer
LETTERS = {"en": "abcdefghiklmnoprstuvw", "de": "abdefghiklmnorstuwzäöü", "ru": "абвгдежзиклмнопрст", "zh": ""}
# Bad rows, one of each kind in turn
BAD_ROWS = (
    '{"prompt": "cut',
    '{"messages": [{"role": "assistant", "content": "no question"}]}',
    '{"prompt": "half a character \\ud83d"}',
    '{"messages": [{"role": "user", "content": " "}]}',
)


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


def generate(args: argparse.Namespace) -> None:
    """Greedy answers by the engine and by a plain loop in the given order, with caches of as many tokens."""
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


def prompts(args: argparse.Namespace) -> None:
    """Write synthetic rows, prepare them here, and print what it took and what became of them."""
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        file, made = Path(directory) / "rows.jsonl", Counter[str]()
        with file.open("w", encoding="utf-8") as output:
            output.writelines(f"{line}\n" for line in synthetic_rows(args.rows, args.words, made))
        print(f"{args.rows} rows, {file.stat().st_size / 1e6:.0f} MB; made on purpose: {dict(made)}")
        print(f"peak memory before: {peak_megabytes():.0f} MB")
        began = time.monotonic()
        train, evaluation = prepare_prompts(PromptMix([str(file)]), PromptMix([]), directory=Path(directory))
        seconds = time.monotonic() - began
        print(f"{seconds:.1f} s, {args.rows / seconds:.0f} rows/s, peak memory {peak_megabytes():.0f} MB")
        for name, made_set in (("train", train), ("eval", evaluation)):
            manifest = made_set.manifest
            print(f"{name}: {len(made_set)} prompts, left out {manifest.left_out}, bad {manifest.bad}")
            print(f"  policies {manifest.policy_actions}, domains {manifest.domains}, languages {manifest.languages}")
        began = time.monotonic()
        prepare_prompts(PromptMix([str(file)]), PromptMix([]), directory=Path(directory))
        print(f"prepared again from disk: {time.monotonic() - began:.1f} s")


def synthetic_rows(num_rows: int, num_words: int, made: Counter[str]) -> Iterator[str]:
    """Lines of JSON in all accepted forms, seeded. `made` counts the exact and near-duplicates and the bad rows."""
    rng = random.Random(0)
    languages = {name: _vocabulary(rng, letters) for name, letters in LETTERS.items()}
    recent: list[tuple[str, list[str]]] = []
    for number in range(num_rows):
        kind = rng.random()
        if kind < 0.002:
            made["bad"] += 1
            yield BAD_ROWS[number % len(BAD_ROWS)]
            continue
        if kind < 0.052 and recent:
            language, words = recent[rng.randrange(len(recent))]
            made["exact duplicates" if kind < 0.022 else "near-duplicates"] += 1
            if kind >= 0.022:
                words = [*words[:-1], rng.choice(languages[language])]
        else:
            language = rng.choices(list(LETTERS), (80, 10, 5, 5))[0]
            length = rng.randint(num_words // 2, num_words * 3 // 2)
            words = rng.choices(languages[language], k=length)
            recent = [*recent[-99:], (language, words)] if number % 10 == 0 else recent
        text = ("" if language == "zh" else " ").join(words)
        row = {"domain": f"domain-{number % 12}", "language": language, **_form(text, number)}
        yield json.dumps(row, ensure_ascii=False)


def _vocabulary(rng: random.Random, letters: str) -> list[str]:
    """Made-up words; Chinese characters where no letters are given."""
    if not letters:
        return [chr(code) for code in range(0x4E00, 0x5A00)]
    return ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(20_000)]


def _form(text: str, number: int) -> dict[str, object]:
    if number % 4 == 0:
        return {"prompt": text}
    if number % 4 == 1:
        return {"turns": [text]}
    if number % 4 == 2:
        return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "A given answer."}]}
    return {"messages": [{"role": "user", "content": text}]}


def peak_megabytes() -> float:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("generate", description=generate.__doc__)
    command.set_defaults(run=generate)
    command.add_argument("--target", default="smollm2-135m", help="demo's name, directory or Hugging Face id")
    command.add_argument("--prompts", type=Path, default=Path("data/prompts/train"), help="JSONL file or directory")
    command.add_argument("--num-prompts", type=int, default=400)
    command.add_argument("--max-prompt-tokens", type=int, default=512, help="longer ones are left out")
    command.add_argument("--max-new-tokens", type=int, default=128)
    command.add_argument("--max-batch-tokens", type=int, default=16384, help="tokens in the cache, for both")
    command.add_argument("--max-batch-rows", type=int, default=64, help="of the engine and of vLLM")
    command.add_argument("--dtype", default="float32")
    command.add_argument("--threads", type=int, help="of the CPU; default: torch's")
    command.add_argument(
        "--beside", nargs="+", default=["engine", "packed"], choices=["engine", "packed", "vllm"],
        help="what runs beside the plain loop; packed: the plain loop with prompts sorted and packed",
    )  # fmt: skip
    command.add_argument("--vllm-python", help="for vllm: Python of an environment that has it")
    command = commands.add_parser("prompts", description=prompts.__doc__)
    command.set_defaults(run=prompts)
    command.add_argument("--rows", type=int, default=1_000_000)
    command.add_argument("--words", type=int, default=60, help="of a row, on average")
    command.add_argument("--directory", type=Path, help="where its files lie for a while; default: a temporary one")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args.run(args)


if __name__ == "__main__":
    main()
