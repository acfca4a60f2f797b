"""Train draft heads (Medusa, Hydra) on a target: data → training → acceptance of checkpoints → gate → registry.

    accelerate launch recipes/train_medusa.py [--config recipes/configs/<target>/medusa.yaml] [--key value …]

Without arguments it makes the demo's heads. The target is frozen, or learns with heads that were trained before
(target_lora_rank: Medusa-2). A finished stage is skipped, an interrupted one continues.
Exit status of this process: 0 promoted, 3 held, 4 rejected, 2 an error that says what to do. `accelerate launch` makes
1 of all but 0: `python recipes/train_medusa.py` starts one process and keeps it; OUTPUT_DIR/gate.json has the verdict.
"""

from functools import cache

import torch
from transformers import TrainingArguments

from specdist.config import RecipeConfig
from specdist.drafter_config import LOW_RANK, HeadsArguments, TrainedSize, check_heads
from specdist.drafters.adapted_target import ADAPTER_DIRECTORY, adapters_size
from specdist.drafters.heads import DraftHeads, HeadsOnTarget, HeadsShape, TargetEnds
from specdist.evaluation.acceptance import HeadsScorer
from specdist.export.medusa import export_medusa
from specdist.stages.arguments import parse
from specdist.stages.assess import assess_export, best_checkpoint, checkpoint_metrics, primary_acceptance
from specdist.stages.changed_target import starting_heads
from specdist.stages.data import evaluation_data, training_data
from specdist.stages.distillation import heads_lesson, lesson_trainer
from specdist.stages.heads import heads_loader, measured_heads, read_heads
from specdist.stages.release import release
from specdist.stages.run import dtype_of, run_recipe
from specdist.stages.start import start
from specdist.stages.train import train
from specdist.target import Target
from specdist.training.arguments import check_arguments
from specdist.training.checkpoints import checkpoint_step
from specdist.tree import DraftTree

DEMO_CONFIG = "recipes/configs/smollm2-135m/medusa.yaml"


def heads_shape(arguments: HeadsArguments, target: Target) -> HeadsShape:
    """The heads that are asked for, on this target."""
    return HeadsShape(
        arguments.medusa_num_heads,
        arguments.medusa_num_layers,
        target.config.get_text_config().hidden_size,
        target.identity.vocab_size,
        arguments.head_kind,
        arguments.head_projection,
        arguments.head_projection_rank if arguments.head_projection == LOW_RANK else 0,
    )


def main() -> int:
    config: RecipeConfig = parse(HeadsArguments, TrainingArguments, default_config=DEMO_CONFIG)
    arguments = config.model

    def check(target: Target) -> TrainedSize:
        check_arguments(config.training)
        check_heads(arguments, config.evaluation, config.objective, config.target)
        if arguments.init_heads:
            starting_heads(arguments.init_heads, heads_shape(arguments, target), target)
        with torch.device("meta"):
            heads = DraftHeads(heads_shape(arguments, target))
        return TrainedSize.whole(sum(p.numel() for p in heads.parameters()) + adapters_size(target, arguments))

    run = start(config, arguments.head_kind, check=check)
    if run is None:
        return 0
    # Only the target's ends are needed to score heads; its layers may stay on disk
    eval_ends = cache(lambda: TargetEnds.of(run.target_model(config.target.eval_dtype)))

    def new_heads() -> DraftHeads:
        shape = heads_shape(arguments, run.target)
        if arguments.init_heads:
            return starting_heads(arguments.init_heads, shape, run.target)
        heads = DraftHeads(shape)
        heads.copy_projection(eval_ends().projection.weight)
        return heads

    loader = heads_loader(run, eval_ends)
    max_length = config.data.max_prompt_tokens + config.data.train_max_new_tokens
    data = training_data(run, max_length=max_length)
    eval_sets = evaluation_data(run, need_states=True)
    if config.release.only_data:
        return 0

    primary_acceptance(run, lambda: HeadsScorer(HeadsOnTarget(new_heads(), eval_ends())), eval_sets, step=0)
    packed = arguments.pack_tokens > 0
    lesson = cache(lambda: heads_lesson(run, data, max_length=max_length, packed=packed))
    train(
        run,
        lambda training: lesson_trainer(run, new_heads(), lesson(), training),
        checkpoint_metrics(run, loader, eval_sets),
    )
    best, points = best_checkpoint(run)
    heads = measured_heads(run, best, eval_sets[0])
    tree = heads.draft_tree

    if run.is_main and not run.export.exists():
        export_medusa(
            read_heads(best, run),
            eval_ends().projection.weight,
            run.target,
            run.export,
            dtype=dtype_of(config.target.target_dtype),
            num_speculative_tokens=heads.chain_length,
            checkpoint_step=checkpoint_step(best),
            draft_tree=DraftTree.of(tree.paths, arguments.medusa_num_heads) if tree else None,
            adapter=best / ADAPTER_DIRECTORY if arguments.changes_target else None,
        )
    run.state.wait_for_everyone()
    return release(run, assess_export(run, loader, eval_sets, points, data.manifest, heads), data.manifest)


if __name__ == "__main__":
    run_recipe(main)
