"""specdist's engine vllm in a process of vLLM's environment: `engine_in_process.py REQUEST.json ANSWER.json`.

Of specdist it needs only what the engine needs: records and errors.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdist.generation.engine import Request
from specdist.generation.vllm import VllmEngine
from specdist.schema import SamplingSpec


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Answers to all requests by their keys, the engine's name, and its seconds without its start."""
    engine = VllmEngine(Path(question["target"]), **question["engine"])
    requests = iter([Request(**{**row, "sampling": SamplingSpec(**row["sampling"])}) for row in question["requests"]])
    began = time.monotonic()
    answers = {a.request.key: asdict(a) for a in engine.answers(lambda: next(requests, None))}
    seconds = time.monotonic() - began
    engine.close()
    return {"engine": engine.name, "answers": answers, "seconds": seconds}


if __name__ == "__main__":
    question_path, answer_path = map(Path, sys.argv[1:])
    answer_path.write_text(json.dumps(answer(json.loads(question_path.read_text()))))
