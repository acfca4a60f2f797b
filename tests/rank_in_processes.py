"""Started by test_heads_report.py in two processes: the ranks and the report of each, written to DIRECTORY/process.pt.

python tests/rank_in_processes.py DIRECTORY
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from test_heads import TARGET
from test_heads_report import SIZES, greedy_set, scorer

from specdist.evaluation.acceptance import EvalText, HeadsScorer
from specdist.evaluation.heads_report import heads_report, rank_texts


class CountingScorer(HeadsScorer):
    """Counts the texts that this process looks at."""

    passes = 0

    def ranks(self, text: EvalText) -> torch.Tensor:
        self.passes += 1
        return super().ranks(text)


def main() -> None:
    state = PartialState(cpu=True)
    own = CountingScorer(scorer().heads)
    ranks = rank_texts(own, greedy_set()).padded
    passes = own.passes
    report = heads_report(own, greedy_set(), TARGET, batch_sizes=(1,), tree_sizes=SIZES)
    result = {"ranks": ranks, "passes": passes, "report": report.to_json()}
    torch.save(result, Path(sys.argv[1]) / f"{state.process_index}.pt")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
