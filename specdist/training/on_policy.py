"""Owns on-policy distillation: the draft itself answers a share of the training prompts, with the weights it has then.

After DistillSpec (Zhou et al. 2024) and GKD (Agarwal et al. 2024): where the draft drafts, it continues its own tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedModel

from specdist.generation.engine import Request
from specdist.generation.hf import TransformersEngine
from specdist.losses import IGNORED
from specdist.schema import SamplingSpec
from specdist.training.batches import padded, rows_of

Document = tuple[list[int], list[int]]  # prompt and answer


def documents(batch: dict[str, Tensor]) -> list[list[Document]]:
    """The documents of each row of a batch that has any, padded or packed."""
    positions = batch.get("position_ids", torch.arange(batch["input_ids"].shape[1]).expand_as(batch["input_ids"]))
    rows = zip(batch["input_ids"], batch["labels"], positions, strict=True)
    return [row for ids, labels, places in rows if (row := list(_documents(ids, labels, places)))]


def _documents(ids: Tensor, labels: Tensor, positions: Tensor) -> Iterator[Document]:
    """Of one row, [T] each. What is not supervised, padding among it, is none."""
    starts = (positions == 0).nonzero()[:, 0].tolist()
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        supervised = (labels[start:end] != IGNORED).nonzero()[:, 0]
        if len(supervised):
            first, last = start + int(supervised[0]), start + int(supervised[-1]) + 1
            yield ids[start:first].tolist(), ids[first:last].tolist()


@dataclass(frozen=True)
class OnPolicy:
    """Replaces a share of the batches' answers by the draft's own, sampled at `temperature`, no longer than they were.

    What is replaced and what is drawn follow from `seed`, the step and the row, so that a resumed run does the same.
    A batch without documents stays as it is.
    """

    share: float
    temperature: float
    eos_token_ids: list[int]
    pad_token_id: int
    seed: int = 0

    def rewrite(self, model: PreTrainedModel, batches: list[dict[str, Tensor]], step: int) -> list[dict[str, Any]]:
        """The batches of one step: those that are drawn hold the draft's answers, marked `on_policy`."""
        drawn = [i for i in range(len(batches)) if random.Random(f"{self.seed}-{step}-{i}").random() < self.share]
        rows = {i: found for i in drawn if (found := documents(batches[i]))}
        answers = self._answers(model, rows, step)
        rewritten: list[dict[str, Any]] = list(batches)
        for i, packs in rows.items():
            rewritten[i] = self._batch(batches[i], packs, (answers[f"{i}-{b}"] for b in count()))
        return rewritten

    def _answers(
        self, model: PreTrainedModel, rows: dict[int, list[list[Document]]], step: int
    ) -> dict[str, list[int]]:
        requests = [
            Request(f"{i}-{b}", prompt, self._sampling(len(answer)), self._seed(step, i, b))
            for i, packs in rows.items()
            for b, (prompt, answer) in enumerate(chain.from_iterable(packs))
        ]
        if not requests:
            return {}
        longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
        engine = TransformersEngine(
            model,
            eos_token_ids=self.eos_token_ids,
            pad_token_id=self.pad_token_id,
            max_batch_rows=len(requests),
            max_batch_tokens=len(requests) * (longest + 64),
        )
        waiting, was_training = iter(requests), model.training
        model.eval()
        try:
            return {a.request.key: a.completion_ids for a in engine.answers(lambda: next(waiting, None))}
        finally:
            model.train(was_training)

    def _sampling(self, length: int) -> SamplingSpec:
        return SamplingSpec(self.temperature, max_new_tokens=max(2, length))

    def _seed(self, step: int, batch: int, row: int) -> int:
        return int(
            np.random.SeedSequence([self.seed, PartialState().process_index, step, batch, row]).generate_state(1)[0]
        )

    def _batch(
        self, original: dict[str, Tensor], packs: list[list[Document]], answers: Iterator[list[int]]
    ) -> dict[str, Any]:
        """`original` with other answers, taken in turn."""
        examples = [[_example(prompt, next(answers)) for prompt, _ in pack] for pack in packs]
        made = padded(rows_of(examples, packed="position_ids" in original), self.pad_token_id)
        device = original["input_ids"].device
        return {key: tensor.to(device) for key, tensor in made.items()} | {"on_policy": torch.tensor(True)}


def _example(prompt: list[int], answer: list[int]) -> dict[str, list[int]]:
    return {"input_ids": prompt + answer, "labels": [IGNORED] * len(prompt) + answer}
