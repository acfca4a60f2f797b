"""Owns reading an export again in a fresh process: same tensors, same drafts as in the process that measured it.

    python -m specdist.stages.reload < request.json > reading.json

The fresh process opens target and drafter by name as `specdist decode` does, and knows nothing else of the run.
"""

import hashlib
import json
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdist.child_process import run_child
from specdist.decoding.loop import decode
from specdist.drafters.base import DecodeContext, Drafter, Proposal
from specdist.drafters.causal_lm import DraftModelDrafter
from specdist.drafters.heads_drafter import HeadsDrafter
from specdist.errors import SpecdistError
from specdist.evaluation.acceptance import EvalSet
from specdist.record import Record
from specdist.schema import SamplingSpec
from specdist.schema_reload import ExportReading, Reload
from specdist.stages.named_drafter import DrafterChoice, open_drafter
from specdist.target import open_target

_NUM_PROMPTS, _NEW_TOKENS = 2, 16
_SECONDS = 3600.0  # a large target takes minutes to load
# What a launcher tells each of its processes; the fresh one is none of them
_OF_A_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class ReloadRequest(Record):
    """What the fresh process is told: where things lie, how they are loaded, and the prompts as token ids."""

    export: str
    target: str
    dtype: str
    device: str
    device_map: str | None
    num_threads: int
    num_speculative_tokens: int
    prompts: list[list[int]]


class _Recorder:
    """A drafter that also keeps what it proposed."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.tree, self.max_draft_tokens = drafter, drafter.tree, drafter.max_draft_tokens
        self.drafts: list[list[int]] = []

    def reset(self) -> None:
        self.drafter.reset()

    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        proposal = self.drafter.propose(context, max_tokens)
        self.drafts.append(proposal.token_ids.tolist())
        return proposal

    def commit(self, num_committed: int, target_hidden: Tensor) -> None:
        self.drafter.commit(num_committed, target_hidden)


def _tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The tensors that a drafter was loaded with, by name."""
    if isinstance(drafter, HeadsDrafter):
        return drafter.heads.heads.state_dict()
    assert isinstance(drafter, DraftModelDrafter)
    return drafter.model.state_dict()


def tensors_sha256(tensors: dict[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of each tensor, in the order of their names."""
    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        whole.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def reload_prompts(eval_set: EvalSet) -> list[list[int]]:
    """The prompts of the longest texts of a greedy set, on which drafts are compared."""
    longest = sorted(eval_set.texts, key=lambda text: (-len(text.row.completion_ids), text.row.id))
    return [text.row.prompt_ids for text in longest[:_NUM_PROMPTS]]


def read_export(
    model: PreTrainedModel, drafter: Drafter, prompts: list[list[int]], eos_token_ids: list[int], gamma: int
) -> ExportReading:
    """What a drafter has in memory and what it drafts for `prompts`, greedily, `gamma` tokens a block."""
    tensors, recorder = _tensors(drafter), _Recorder(drafter)
    for prompt_ids in prompts:
        sampling = SamplingSpec(max_new_tokens=_NEW_TOKENS)
        decode(model, prompt_ids, sampling, eos_token_ids, drafter=recorder, num_speculative_tokens=gamma)
    return ExportReading(len(tensors), tensors_sha256(tensors), recorder.drafts)


def reload_export(measured: ExportReading, request: ReloadRequest) -> Reload:
    """Let a fresh process read the export, and put its reading beside what was `measured` here."""
    ended = run_child(
        ["-m", "specdist.stages.reload"], json.dumps(request.to_json()), seconds=_SECONDS, without=_OF_A_LAUNCH
    )
    if ended.fault:
        return Reload(measured, fault=ended.fault)
    return Reload(measured, ExportReading.from_json(json.loads(ended.output), "the fresh process's reading"))


def _read(request: ReloadRequest) -> ExportReading:
    """The whole work of the fresh process."""
    torch.set_num_threads(request.num_threads)
    torch.seed()  # what the files lack is initialised as in no other process
    target = open_target(request.target)
    choice = DrafterChoice(request.export, num_speculative_tokens=request.num_speculative_tokens)
    dtype = getattr(torch, request.dtype)
    opened = open_drafter(choice, target, dtype, request.device, device_map=request.device_map)
    assert opened.drafter is not None
    eos = target.identity.eos_token_ids
    return read_export(opened.model, opened.drafter, request.prompts, eos, request.num_speculative_tokens)


def main() -> int:
    """Read the request on standard input and write the reading; what fails is the last line on standard error."""
    try:
        reading = _read(ReloadRequest.from_json(json.load(sys.stdin), "request"))
    except SpecdistError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(json.dumps(reading.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
