"""Owns training a draft model on the target's own text: TRL's SFTTrainer over token ids, nothing re-tokenised.

Shapes: B rows, T tokens, S supervised positions, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from specdist.errors import ConfigError
from specdist.losses import linear_cross_entropy
from specdist.training.order import seeded_by_epoch

IGNORED = -100
# Models with one of these scale or cap their logits after the projection
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


class DraftTrainer(SFTTrainer):
    """SFTTrainer with the projection and the loss fused over supervised positions, which costs a quarter on CPUs.

    TRL's own loss serves where the projection is no plain matrix product, or its weight is sharded.
    """

    def __init__(self, model: PreTrainedModel, **arguments: Any) -> None:
        super().__init__(model=model, **arguments)
        config = model.config.get_text_config()
        transformed = any(getattr(config, name, None) not in (None, 1.0) for name in _LOGIT_TRANSFORMS)
        self._fuses_projection = not (transformed or self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return seeded_by_epoch(super()._get_train_sampler(train_dataset), self)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Cross-entropy as a mean over the supervised tokens of all processes and accumulation steps."""
        if not self._fuses_projection or return_outputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        output = model(
            input_ids=inputs["input_ids"],  # padded at the right: causal attention never sees it, no mask is needed
            use_cache=False,
            output_hidden_states=True,
            logits_to_keep=1,
        )
        labels = inputs["labels"][:, 1:]  # position t predicts token t+1
        supervised = labels != IGNORED  # [B, T − 1]
        hidden = output.hidden_states[-1][:, :-1][supervised]  # [S, D]
        weight = self.accelerator.unwrap_model(model).get_output_embeddings().weight
        with self.accelerator.autocast():  # which the trainer applies to the model's own forward only
            total = linear_cross_entropy(hidden, weight, labels[supervised])
        if num_items_in_batch is None:
            return total / supervised.sum().clamp(min=1)
        # The count covers all processes, over which DDP averages the gradients
        return total / torch.as_tensor(num_items_in_batch).clamp(min=1) * self.accelerator.num_processes


def draft_trainer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Dataset,
    arguments: SFTConfig,
    *,
    freeze_embeddings: bool,
) -> DraftTrainer:
    """A trainer over `examples` (input_ids, and labels that are −100 on the prompt).

    `freeze_embeddings` keeps the token embeddings and the output projection as they are. Raises ConfigError on
    packing, with which rows would attend to each other here.
    """
    if arguments.packing or arguments.padding_free:
        raise ConfigError(
            "packing and padding_free: examples would attend to each other; leave both out and set "
            "train_sampling_strategy: group_by_length, which keeps padding small"
        )
    if freeze_embeddings:
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
    arguments.dataset_kwargs = {"skip_prepare_dataset": True}  # token ids and labels are final
    return DraftTrainer(model, args=arguments, train_dataset=examples, processing_class=tokenizer)
