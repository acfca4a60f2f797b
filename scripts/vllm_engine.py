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
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")


def counters(llm: vllm.LLM) -> dict[str, int]:
    """vLLM's counters of speculative decoding since the engine began."""
    found = dict.fromkeys(COUNTERS, 0)
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_")
        if name in found:
            found[name] += metric.value
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
    before = counters(llm)
    for prompt_ids in request["prompts"]:
        began = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": prompt_ids}], params, use_tqdm=False)[0].outputs[0]
        seconds = time.perf_counter() - began
        after = counters(llm)
        best = [{str(token): entry.logprob for token, entry in step.items()} for step in output.logprobs or []]
        added = {name: after[name] - before[name] for name in COUNTERS}
        answers.append({"token_ids": list(output.token_ids), "best": best, "seconds": seconds, **added})
        before = after
    return answers


if __name__ == "__main__":
    question, result = map(Path, sys.argv[1:])
    result.write_text(json.dumps(answer(json.loads(question.read_text()))))
