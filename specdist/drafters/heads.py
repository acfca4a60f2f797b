"""Owns Medusa heads: residual blocks over the target's final hidden state, projected by the target's own output layer.

Shapes: H heads, L residual blocks of a head, D hidden size, V vocabulary, N drafted tokens.
Offset rule: from the hidden state at position t, which produced token t+1, head i predicts token t+2+i.
The state dict has the field's names, `{head}.{block}.linear.{weight,bias}` (FasterDecoding/Medusa).
"""

import re
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.drafters.base import DecodeContext, Proposal
from specdist.errors import ArtifactError
from specdist.verify import sample, served_logprobs

HEADS_FILE = "medusa_lm_head.safetensors"
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b) with W and b zero at first, so that an untrained head is the target's own next-token guess."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.activation = nn.SiLU()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.activation(self.linear(hidden))


class MedusaHeads(nn.ModuleList):
    """H heads of L residual blocks each, every block with parameters of its own (Cai et al. 2024, section 2.1.1)."""

    def __init__(self, num_heads: int, num_layers: int, hidden_size: int) -> None:
        super().__init__(
            nn.Sequential(*(ResidualBlock(hidden_size) for _ in range(num_layers))) for _ in range(num_heads)
        )
        self.num_heads, self.num_layers, self.hidden_size = num_heads, num_layers, hidden_size

    def forward(self, hidden: Tensor) -> Tensor:
        """Features that the output layer turns into each head's logits: [..., D] → [H, ..., D]."""
        return torch.stack([head(hidden) for head in self])


def heads_file(directory: Path) -> Path:
    """The heads' weights in an export, or in a checkpoint of the trainer."""
    exported = directory / HEADS_FILE
    return exported if exported.exists() else directory / "model.safetensors"


def load_heads(path: Path) -> MedusaHeads:
    """Heads from a safetensors file; their numbers are read off the tensors, which must be complete and alike.

    A copy of the target's projection (`0.{L}.weight`, which vLLM needs) is passed over. Raises ArtifactError.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{path}: Medusa heads cannot be read ({error}); the file is missing or cut") from error
    blocks = {name: m for name in tensors if (m := _BLOCK.fullmatch(name))}
    if not blocks:
        raise ArtifactError(f"{path}: no tensor named like 0.0.linear.weight; got {sorted(tensors)[:4]}")
    num_heads = 1 + max(int(m[1]) for m in blocks.values())
    num_layers = 1 + max(int(m[2]) for m in blocks.values())
    extra = set(tensors) - set(blocks) - {f"0.{num_layers}.weight"}
    heads = MedusaHeads(num_heads, num_layers, tensors[next(iter(blocks))].shape[0])
    expected = {name: tuple(tensor.shape) for name, tensor in heads.state_dict().items()}
    found = {name: tuple(tensors[name].shape) for name in blocks}
    if extra or expected != found:
        wrong = sorted(extra | {n for n in expected | found if expected.get(n) != found.get(n)})
        raise ArtifactError(f"{path}: not {num_heads} heads of {num_layers} blocks; wrong or missing: {wrong[:6]}")
    heads.load_state_dict({name: tensors[name].float() for name in blocks})
    return heads


class MedusaDrafter:
    """Drafts a chain in one pass: the best token of each head, from the hidden state that produced the newest token."""

    def __init__(self, heads: MedusaHeads, target_model: PreTrainedModel) -> None:
        self.projection = target_model.get_output_embeddings()
        self.heads = heads.to(device=target_model.device, dtype=target_model.dtype).eval()
        self.max_draft_tokens: int | None = heads.num_heads
        self.hidden: Tensor | None = None

    def reset(self) -> None:
        self.hidden = None

    @torch.inference_mode()
    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        features = torch.stack([head(self.hidden) for head in list(self.heads)[:max_tokens]])  # [N, D]
        logits = self.projection(features).float()  # [N, V]
        if context.draft_sampling is None:
            return Proposal(logits.argmax(dim=-1), None)
        probs = served_logprobs(logits, context.draft_sampling).exp()
        return Proposal(sample(probs, context.generator), probs)

    def commit(self, num_committed: int, target_hidden: Tensor) -> None:
        self.hidden = target_hidden
