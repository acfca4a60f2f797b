"""Measures reading, validating, deduplicating and splitting of synthetic prompts, a million if not told otherwise."""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from specdist.dataset.prepare import PromptMix, prepare_prompts

LETTERS = {"en": "abcdefghiklmnoprstuvw", "de": "abdefghiklmnorstuwzäöü", "ru": "абвгдежзиклмнопрст", "zh": ""}
# Bad rows, one of each kind in turn
BAD_ROWS = (
    '{"prompt": "cut',
    '{"messages": [{"role": "assistant", "content": "no question"}]}',
    '{"prompt": "half a character \\ud83d"}',
    '{"messages": [{"role": "user", "content": " "}]}',
)


def run(args: argparse.Namespace) -> None:
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


def main(arguments: list[str]) -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser("benchmark.py prompts", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--words", type=int, default=60, help="of a row, on average")
    parser.add_argument("--directory", type=Path, help="where its files lie for a while; default: a temporary one")
    run(parser.parse_args(arguments))
