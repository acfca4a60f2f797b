"""Started by test_draft_training.py in one process or two: a few steps on uneven rows, written to a file.

python tests/train_in_processes.py OUTPUT BATCH ACCUMULATION
"""

import sys
from pathlib import Path

import torch
from draft_factory import MIXTURE, examples, make_trainer, target_output

ROWS = [(4, 9), (11, 3), (2, 20), (7, 1), (5, 5), (3, 14), (9, 2)]  # one too few: no row may count twice


def main() -> None:
    output, batch, accumulation = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    trainer = make_trainer(
        output.parent / "trainer",
        examples(ROWS),
        batch=batch,
        accumulation=accumulation,
        objective=MIXTURE,
        target=target_output(),
        learning_rate=1.0,  # of plain SGD, so that the first step's change of the weights is the gradient
        max_steps=1,
    )
    before = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach().clone()
    trainer.train()
    after = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    if trainer.accelerator.is_main_process:
        result = {"gradient": before - after, "loss": loss, "processes": trainer.accelerator.num_processes}
        torch.save(result, output)


if __name__ == "__main__":
    main()
