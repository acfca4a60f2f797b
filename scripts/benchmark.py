"""Measures parts of specdist on this machine; each figure is a ratio or a peak from one run.

python scripts/benchmark.py generate --help      the embedded engine against a plain fixed-batch loop
python scripts/benchmark.py prompts --help       reading, validating, deduplicating and splitting a million prompts
python scripts/benchmark.py losses --help        objectives fused with the projection, against eager ones and TRL's
python scripts/benchmark.py train-draft --help   whole steps of the demo's draft: eager, ours, TRL's
python scripts/benchmark.py train-heads --help   whole steps of Medusa heads: as published, written plainly, and ours
python scripts/benchmark.py decode --help        tokens per second with each drafter, alone, and of transformers'
python scripts/benchmark.py replay --help        acceptance by replay against decoding: cost, and width of intervals
python scripts/benchmark.py tracking --help      what W&B costs a training, with servers that refuse or hang
"""

import importlib
import logging
import sys

MEASUREMENTS = {
    "generate": "benchmark_generate",
    "prompts": "benchmark_prompts",
    "losses": "benchmark_losses",
    "train-draft": "benchmark_train_draft",
    "train-heads": "benchmark_train_heads",
    "decode": "benchmark_decode",
    "replay": "benchmark_replay",
    "tracking": "benchmark_tracking",
}


def main() -> int | None:
    """Run the measurement that the command line names."""
    name, *arguments = sys.argv[1:] or [""]
    if name not in MEASUREMENTS:
        print(__doc__)
        return 0 if name in ("-h", "--help") else 2
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    return importlib.import_module(MEASUREMENTS[name]).main(arguments)


if __name__ == "__main__":
    sys.exit(main())
