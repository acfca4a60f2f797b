"""Owns training a draft model on the target's own text: TRL's SFTTrainer over token ids, nothing re-tokenised."""

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer


def draft_trainer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: Dataset, arguments: SFTConfig
) -> SFTTrainer:
    """A trainer over `examples` (input_ids, and labels that are −100 on the prompt).

    The loss is the mean over the supervised tokens of all processes and accumulation steps (SFTTrainer).
    """
    arguments.dataset_kwargs = {"skip_prepare_dataset": True}  # token ids and labels are final
    return SFTTrainer(model=model, args=arguments, train_dataset=examples, processing_class=tokenizer)
