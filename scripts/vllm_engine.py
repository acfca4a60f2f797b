"""One vLLM engine in a process of its own: answers the prompts of a request, `vllm_engine.py REQUEST.json ANSWER.json`.

Knows nothing of specdist: what it opens, any server opens.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import vllm

BEST_TOKENS = 5  # log-probabilities kept at each position of an output without speculation
# vLLM's names → those of an answer; the last one counts each position of a draft
COUNTERS = {
    "num_drafts": "num_drafts",
    "num_draft_tokens": "num_draft_tokens",
    "num_accepted_tokens_per_pos": "accepted_at_position",
}


def counters(llm: vllm.LLM, positions: int) -> dict[str, list[int]]:
    """vLLM's counters of speculative decoding since the engine began, by the names of an answer."""
    found = {name: [0] * (positions if name == "accepted_at_position" else 1) for name in COUNTERS.values()}
    for metric in llm.get_metrics():
        name = COUNTERS.get(metric.name.removeprefix("vllm:spec_decode_"))
        if name is not None:
            values = metric.values if name == "accepted_at_position" else [metric.value]
            found[name] = [a + b for a, b in zip(found[name], values, strict=True)]
    return found


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Greedy output of every prompt, seconds and counters that it took; without speculation the best tokens too."""
    # One request at a time and no cached prefixes: the passes over the target then have the same shapes whatever the
    # other prompts are, and counters can be read prompt by prompt.
    llm = vllm.LLM(
        request["target"],
        skip_tokenizer_init=True,
        dtype=request["dtype"],
        max_model_len=request["max_model_len"],
        max_num_seqs=1,
        enable_prefix_caching=False,
        enforce_eager=True,
        speculative_config=request["speculative_config"],
        disable_log_stats=False,
    )
    params = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=request["max_new_tokens"],
        stop_token_ids=request["stop_token_ids"],  # without a tokenizer vLLM knows no end of text
        logprobs=None if request["speculative_config"] else BEST_TOKENS,
        detokenize=False,
    )
    answers = []
    positions = (request["speculative_config"] or {}).get("num_speculative_tokens", 0)
    before = counters(llm, positions)
    for prompt_ids in request["prompts"]:
        began = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)[0].outputs[0]
        seconds = time.perf_counter() - began
        after = counters(llm, positions)
        best = [{str(token): entry.logprob for token, entry in step.items()} for step in output.logprobs or []]
        added = {name: [b - a for a, b in zip(before[name], after[name], strict=True)] for name in after}
        numbers = {name: values if name == "accepted_at_position" else values[0] for name, values in added.items()}
        answers.append({"token_ids": list(output.token_ids), "best": best, "seconds": seconds, **numbers})
        before = after
    return answers


if __name__ == "__main__":
    question, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(answer(json.loads(question.read_text()))))
