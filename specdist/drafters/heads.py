"""Owns draft heads: Medusa's residual blocks over the target's final hidden state, and Hydra's, which see the draft.

Shapes: H heads, L residual blocks of a head, D hidden size, V vocabulary, R rank, N positions.
Offset rule: from the hidden state at position t, which produced token t+1, head i predicts token t+2+i. A Hydra head i
sees the embeddings of tokens t+1 to t+1+i as well: the newest token, and what the heads before it drafted.
Names of the state dict are the field's (FasterDecoding/Medusa): `{head}.{block}.linear.{weight,bias}`, and
`{head}.{L}.weight` for a projection of the head's own.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdist.drafter_config import HYDRA, LOW_RANK, MEDUSA, OWN, SHARED
from specdist.losses import Projection
from specdist.target import output_projection


@dataclass(frozen=True)
class HeadsShape:
    """All that determines the tensors of draft heads. `projection` to the vocabulary: shared (the target's, frozen),
    own (a copy to train) or low_rank (the target's plus a trained difference of rank `rank`)."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    kind: str = MEDUSA
    projection: str = SHARED
    rank: int = 0


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b) with W and b zero at first, so that an untrained head is the target's own next-token guess.

    With `num_embeddings` E > 0 it also sees e, so many embeddings brought to unit RMS: x + Ue + SiLU(W[x; e] + b).
    """

    def __init__(self, hidden_size: int, num_embeddings: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size * (1 + num_embeddings), hidden_size)
        self.skip = nn.Linear(hidden_size * num_embeddings, hidden_size, bias=False) if num_embeddings else None
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """[N, D], and [N, E, D] where it sees embeddings → [N, D]."""
        if self.skip is None or embeddings is None:
            return hidden + nn.functional.silu(self.linear(hidden))
        seen = nn.functional.rms_norm(embeddings, embeddings.shape[-1:]).flatten(-2).to(hidden.dtype)  # [N, E · D]
        return hidden + self.skip(seen) + nn.functional.silu(self.linear(torch.cat([hidden, seen], dim=-1)))


class Head(nn.ModuleDict):
    """The blocks of one head by number, then its own projection, or the two factors of its difference."""

    def __init__(self, shape: HeadsShape, index: int) -> None:
        num_embeddings = index + 1 if shape.kind == HYDRA else 0
        modules: dict[str, nn.Module] = {
            str(j): ResidualBlock(shape.hidden_size, num_embeddings if j == 0 else 0) for j in range(shape.num_layers)
        }
        if shape.projection == OWN:
            modules[str(shape.num_layers)] = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        elif shape.projection == LOW_RANK:
            down = nn.Linear(shape.hidden_size, shape.rank, bias=False)
            up = nn.Linear(shape.rank, shape.vocab_size, bias=False)
            generator = torch.Generator().manual_seed(index)  # the same heads in every process and every run
            nn.init.normal_(down.weight, std=shape.hidden_size**-0.5, generator=generator)
            nn.init.zeros_(up.weight)
            modules |= {"down": down, "up": up}
        super().__init__(modules)
        self.num_layers = shape.num_layers

    def forward(self, hidden: Tensor, embeddings: Tensor | None) -> Tensor:
        """Features [N, D], and their low-rank coordinates beside them [N, D + R] where the head has such."""
        features = self["0"](hidden, embeddings)
        for j in range(1, self.num_layers):
            features = self[str(j)](features)
        return torch.cat([features, self["down"](features)], dim=-1) if "down" in self else features


class DraftHeads(nn.ModuleList):
    """H heads of L residual blocks each, every block with parameters of its own (Cai et al. 2024, section 2.1.1).

    Hydra: Ankner et al. 2024, section 3, in Medusa's block.
    """

    def __init__(self, shape: HeadsShape) -> None:
        super().__init__(Head(shape, index) for index in range(shape.num_heads))
        self.shape = shape

    @property
    def num_heads(self) -> int:
        return self.shape.num_heads

    def forward(self, hidden: Tensor, embeddings: Tensor | None = None) -> list[Tensor]:
        """What each head's projection turns into logits, for all heads: [N, D] → H times [N, D] or [N, D + R].

        `embeddings` [N, H, D] for Hydra: the target's of the H tokens after each position, of which head i sees i + 1.
        """
        return [self.features(i, hidden, embeddings) for i in range(self.num_heads)]

    def features(self, index: int, hidden: Tensor, embeddings: Tensor | None = None) -> Tensor:
        """What head `index` makes of states [N, D]; of `embeddings` [N, ≥ index + 1, D] it sees index + 1."""
        return self[index](hidden, None if embeddings is None else embeddings[..., : index + 1, :])

    def projection(self, index: int, target: Projection) -> Projection:
        """How head `index` turns features into logits, given how the target does."""
        if self.shape.projection == OWN:
            return replace(target, weight=self._own(index))
        if self.shape.projection == LOW_RANK:
            return replace(target, update=self.get_parameter(f"{index}.up.weight"))
        return target

    def _own(self, index: int) -> Tensor:
        return self.get_parameter(f"{index}.{self.shape.num_layers}.weight")

    @torch.no_grad()
    def copy_projection(self, weight: Tensor) -> None:
        """Start every head's own projection as the target's `weight` [V, D]; nothing to do where there are none."""
        for i in range(self.num_heads if self.shape.projection == OWN else 0):
            self._own(i).copy_(weight)


@dataclass(frozen=True)
class TargetEnds:
    """What heads share with the target: its output projection and token embeddings. The layers between may go."""

    projection: Projection
    embed: nn.Module

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TargetEnds":
        """The ends of a loaded target."""
        return cls(output_projection(model, model.config), model.get_input_embeddings())


class HeadsOnTarget:
    """Heads in use, on the device and in the dtype of the target's ends. No gradients."""

    def __init__(self, heads: DraftHeads, ends: TargetEnds) -> None:
        weight = ends.projection.weight
        self.heads = heads.to(device=weight.device, dtype=weight.dtype).eval()
        self.projections = [heads.projection(i, ends.projection) for i in range(heads.num_heads)]
        self.embed = ends.embed
        self.device = weight.device

    @property
    def num_heads(self) -> int:
        return self.heads.num_heads

    @property
    def sees_draft(self) -> bool:
        """Whether logits depend on what was drafted before."""
        return self.heads.shape.kind == HYDRA

    @torch.inference_mode()
    def logits(self, index: int, hidden: Tensor, path: Tensor) -> Tensor:
        """Logits of head `index`, fp32: states [N, D] → [N, V].

        `path` [N, ≥ index + 1]: ids of the tokens that follow each state's position, the newest token of the text
        first, then what was drafted. Medusa heads do not look at it.
        """
        hidden = hidden.to(self.heads.get_parameter("0.0.linear.weight").dtype)
        embeddings = self.embed(path[:, : index + 1]) if self.sees_draft else None
        return self.projections[index].of(self.heads.features(index, hidden, embeddings))

    @torch.inference_mode()
    def logits_ahead(self, hidden: Tensor, count: int) -> Tensor:
        """Logits of the first `count` heads before anything is drafted, fp32: states [N, D] → [count, N, V].

        The target's projection, where heads share it, is read once for all of them: it is most of what a head costs.
        Raises ValueError where heads see the draft.
        """
        if self.sees_draft:
            raise ValueError("these heads see what was drafted before: ask each after its draft (logits)")
        hidden = hidden.to(self.heads.get_parameter("0.0.linear.weight").dtype)
        features = [self.heads.features(i, hidden) for i in range(count)]
        projections = self.projections[:count]
        if self.heads.shape.projection == OWN:
            return torch.stack([own.of(feature) for own, feature in zip(projections, features, strict=True)])
        columns = hidden.shape[-1]
        products = torch.stack([feature[..., :columns] for feature in features]) @ self.projections[0].weight.T
        for product, feature, projection in zip(products, features, projections, strict=True):
            if projection.update is not None:
                product += feature[..., columns:] @ projection.update.T
        return self.projections[0].logits(products)
