"""Owns training a draft model: TRL's SFTTrainer over token ids, with any objective fused with the projection.

Shapes: B rows, T tokens, S supervised positions of a batch in row order, D hidden size, V vocabulary, K best tokens.
"""

from dataclasses import replace
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import SFTConfig, SFTTrainer

from specdist.errors import ConfigError
from specdist.fused_losses import linear_objective
from specdist.losses import (
    IGNORED,
    FullTarget,
    Objective,
    Projection,
    TargetDistributions,
    TopTarget,
)
from specdist.target import output_projection
from specdist.training.arguments import check_arguments, settle_arguments
from specdist.training.batches import DraftCollator, schedule
from specdist.training.finite import StepWatch
from specdist.training.on_policy import OnPolicy
from specdist.training.order import seeded_by_epoch
from specdist.training.target_output import TargetOutput, model_inputs


def limited(projection: Projection, vocabulary: Tensor | slice) -> Projection:
    """The projection to some tokens only."""
    bias = None if projection.bias is None else projection.bias[vocabulary]
    return replace(projection, weight=projection.weight[vocabulary], bias=bias)


class DraftTrainer(SFTTrainer):
    """SFTTrainer whose loss is `objective`, fused with the projection over supervised positions.

    `num_tokens` is the tokenizer's size: ids from there on pad a vocabulary and count nowhere. `target` gives the
    target's distributions where the objective compares any. `vocabulary` [R] are the tokens that the draft may propose,
    sorted; None is all of them.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        *,
        num_tokens: int,
        objective: Objective,
        target: TargetOutput | None,
        vocabulary: Tensor | None,
        on_policy: OnPolicy | None,
        **arguments: Any,
    ) -> None:
        super().__init__(model=model, **arguments)
        self.model_accepts_loss_kwargs = True  # so that tokens are counted over processes and accumulation steps
        self.objective: Objective = objective
        self.target = None if target is None else target.on(self.args.device)
        self.on_policy, self.num_tokens = on_policy, num_tokens
        self.vocabulary = vocabulary
        self.places = self._places()
        self._sums = torch.zeros(len(objective.weights), device=self.args.device)
        self._count = torch.zeros((), device=self.args.device)
        self.watch = StepWatch(list(objective.weights), arguments["data_collator"].examples)
        self.add_callback(self.watch)

    def _places(self) -> Tensor:
        """A token's place among the draft's R logits, R where it has none: [tokenizer's size + 1], the last for all ids
        that pad a vocabulary."""
        proposed = torch.arange(self.num_tokens) if self.vocabulary is None else self.vocabulary
        places = torch.full((self.num_tokens + 1,), len(proposed))
        places[proposed] = torch.arange(len(proposed))
        return places.to(self.args.device)

    def _places_of(self, token_ids: Tensor) -> Tensor:
        return self.places[token_ids.clamp(max=self.num_tokens)]

    def _tokens(self, projection: Projection) -> Projection:
        """Without what pads the vocabulary, and without tokens that the draft may not propose."""
        if self.vocabulary is not None:
            return limited(projection, self.vocabulary.to(projection.weight.device))
        return projection if len(projection.weight) == self.num_tokens else limited(projection, slice(self.num_tokens))

    def _distributions(self, inputs: dict[str, Tensor], supervised: Tensor) -> TargetDistributions | None:
        if not self.objective.needs_target:
            return None
        if "top_ids" in inputs:
            return TopTarget(self._places_of(inputs["top_ids"]), inputs["top_logprobs"], inputs["tail_mass"])
        if self.target is None:
            raise ConfigError(f"objective {list(self.objective.weights)}: needs the target's distributions")
        projection = self.target.projection
        if len(projection.weight) > self.num_tokens:
            projection = limited(projection, slice(self.num_tokens))
        vocabulary = None if self.vocabulary is None else self.vocabulary.to(supervised.device)
        at = torch.nn.functional.pad(supervised, (0, 1))  # [B, T]: nothing follows the last position
        return FullTarget(self.target.states(inputs, at), projection, vocabulary)

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return seeded_by_epoch(super()._get_train_sampler(train_dataset), self)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The objective as a mean over the supervised tokens of all processes and accumulation steps."""
        unwrapped = self.accelerator.unwrap_model(model)
        output = model(
            **model_inputs(inputs, unwrapped.config), use_cache=False, output_hidden_states=True, logits_to_keep=1
        )
        labels = inputs["labels"][:, 1:]  # position t predicts token t+1
        supervised = labels != IGNORED  # [B, T − 1]
        states = output.hidden_states[-1].reshape(*inputs["labels"].shape, -1)  # [B, T, D]
        hidden = states[:, :-1][supervised]  # [S, D]
        projection = self._tokens(output_projection(unwrapped, unwrapped.config))
        tokens = self._places_of(labels[supervised])
        # What the draft cannot propose it cannot learn to say, and what it wrote itself is no example
        tokens = tokens.masked_fill((tokens == len(projection.weight)) | ("on_policy" in inputs), IGNORED)
        with self.accelerator.autocast():  # which the trainer applies to the model's own forward only
            distributions = self._distributions(inputs, supervised)
            total, sums = linear_objective(hidden, projection, tokens, self.objective, distributions)
        self.watch.add_losses(total, sums)
        self._sums += sums
        self._count += supervised.sum()
        count = supervised.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        # The count covers all processes, over which DDP averages the gradients
        share = 1 if num_items_in_batch is None else self.accelerator.num_processes
        loss = total / count.clamp(min=1) * share
        return (loss, output) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Batches of a step, some of them answered by the draft itself; their tokens are counted anew."""
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.watch.begin(batches)
        if self.on_policy is None or not batches:
            return batches, count
        model = self.accelerator.unwrap_model(self.model)
        if isinstance(model, PeftModel):
            model = model.get_base_model()  # with the adapters in it; PEFT's own forward hides what the model takes
        with self.accelerator.autocast():
            batches = self.on_policy.rewrite(model, batches, self.state.global_step)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_grad_norm(self, model: torch.nn.Module, grad_norm: Tensor | float | None = None) -> Tensor | float | None:
        return self.watch.end(self, super()._get_grad_norm(model, grad_norm))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add each loss's own mean per token since the last log, where there are several."""
        if "loss" in logs and len(self.objective.weights) > 1:
            means = (self.accelerator.reduce(self._sums) / self.accelerator.reduce(self._count)).tolist()
            logs.update(dict(zip((f"loss/{name}" for name in self.objective.weights), means, strict=True)))
        if "loss" in logs:
            self._sums.zero_()
            self._count.zero_()
        super().log(logs, start_time)


def check_training(arguments: SFTConfig, *, on_policy: bool) -> None:
    """Raise ConfigError on what this trainer cannot honour, before there is work to lose."""
    check_arguments(arguments, on_policy=on_policy)
    if arguments.padding_free:
        raise ConfigError("padding_free = true: documents would attend to each other; set packing: true instead")
    if arguments.max_length is None:
        raise ConfigError("max_length is empty: expected the longest prompt with answer that is trained on, in tokens")


def draft_trainer(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    collator: DraftCollator,
    arguments: SFTConfig,
    *,
    num_tokens: int,
    objective: Objective,
    target: TargetOutput | None = None,
    vocabulary: Tensor | None = None,
    on_policy: OnPolicy | None = None,
    freeze_embeddings: bool = False,
) -> DraftTrainer:
    """A trainer over the examples of `collator` (input_ids, labels that are −100 on the prompt, prompt_length).

    A packed collator gets packs of up to `max_length` tokens. `freeze_embeddings` keeps the token embeddings and the
    output projection as they are.
    """
    if freeze_embeddings:
        model.get_input_embeddings().requires_grad_(False)
        model.get_output_embeddings().requires_grad_(False)
    settle_arguments(arguments, on_policy=on_policy is not None)
    arguments.dataset_kwargs = {"skip_prepare_dataset": True}  # token ids and labels are final
    arguments.packing = False  # TRL's own would cut documents; ours are packed already
    return DraftTrainer(
        model,
        num_tokens=num_tokens,
        objective=objective,
        target=target,
        vocabulary=vocabulary,
        on_policy=on_policy,
        args=arguments,
        train_dataset=schedule(
            collator.examples,
            arguments.max_length if collator.packed else None,
            multiple_of=arguments.train_batch_size * arguments.world_size,
        ),
        data_collator=collator,
        processing_class=tokenizer,
    )
