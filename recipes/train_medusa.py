"""Train Medusa heads on a frozen target: data → training → acceptance of every checkpoint → gate → registry.

    accelerate launch recipes/train_medusa.py [--config recipes/configs/<target>/medusa.yaml] [--key value …]

Without arguments it makes the demo's heads. A finished stage is skipped, an interrupted one continues.
Exit status: 0 promoted, 3 held, 4 rejected, 2 an error that says what to do.
"""

from functools import cache

from transformers import TrainingArguments

from specdist.config import RecipeConfig
from specdist.drafter_config import HeadsArguments, check_heads
from specdist.drafters.heads import MedusaDrafter, MedusaHeads, heads_file, load_heads
from specdist.errors import ConfigError
from specdist.evaluation.acceptance import HeadsScorer
from specdist.export.medusa import export_medusa
from specdist.stages.arguments import parse
from specdist.stages.assess import Loader, assess_export, best_checkpoint, checkpoint_metrics, primary_acceptance
from specdist.stages.data import evaluation_data, training_data
from specdist.stages.release import release
from specdist.stages.run import dtype_of, run_recipe, start
from specdist.stages.train import train
from specdist.target import Target
from specdist.training.checkpoints import checkpoint_step
from specdist.training.heads import heads_trainer

DEMO_CONFIG = "recipes/configs/smollm2-135m/medusa.yaml"


def main() -> int:
    config: RecipeConfig = parse(HeadsArguments, TrainingArguments, default_config=DEMO_CONFIG)
    arguments, evaluation = config.model, config.evaluation

    def new_heads(target: Target) -> MedusaHeads:
        hidden_size = target.config.get_text_config().hidden_size
        return MedusaHeads(arguments.medusa_num_heads, arguments.medusa_num_layers, hidden_size)

    def check(target: Target) -> int:
        check_heads(arguments, evaluation)
        if config.objective.needs_target:
            raise ConfigError(f"objective {config.objective.objective}: heads learn by cross_entropy")
        return 4 * sum(p.numel() for p in new_heads(target).parameters())

    run = start(config, "medusa", check=check)
    if run is None:
        return 0
    # Only the target's output projection is needed to score heads; the target itself may stay on disk
    projection = cache(lambda: run.target_model(config.target.eval_dtype).get_output_embeddings())
    loader = Loader(
        scorer=lambda path: HeadsScorer(load_heads(heads_file(path)), projection(), run.device),
        drafter=lambda path, target: MedusaDrafter(load_heads(heads_file(path)), target),
    )

    max_length = config.data.max_prompt_tokens + config.data.train_max_new_tokens
    data = training_data(run, max_length=max_length)
    eval_sets = evaluation_data(run, need_states=True)
    if config.release.only_data:
        return 0

    untrained = HeadsScorer(new_heads(run.target), projection(), run.device)
    primary_acceptance(run, lambda: untrained, eval_sets, step=0)
    train(
        run,
        lambda training_arguments: heads_trainer(
            new_heads(run.target),
            run.target_model(config.target.target_dtype),
            data.examples,
            training_arguments,
            decay=arguments.head_loss_decay,
            pad_token_id=run.target.identity.eos_token_ids[0],
        ),
        checkpoint_metrics(run, loader, eval_sets),
    )
    best, points = best_checkpoint(run)

    if run.is_main and not run.export.exists():
        export_medusa(
            load_heads(heads_file(best)),
            projection().weight,
            run.target,
            run.export,
            dtype=dtype_of(config.target.target_dtype),
            num_speculative_tokens=evaluation.num_speculative_tokens,
            checkpoint_step=checkpoint_step(best),
        )
    run.state.wait_for_everyone()
    return release(run, assess_export(run, loader, eval_sets, points, data.manifest))


if __name__ == "__main__":
    run_recipe(main)
