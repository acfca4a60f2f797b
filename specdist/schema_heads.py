"""Owns the records of what was measured on draft heads alone: accuracies, chains and trees, and what they cost.

They are part of an evaluation report (schema.py) and apart from it because of their size.
"""

from dataclasses import dataclass

from specdist.record import Record

TOP = (1, 2, 5, 10)  # of how many best tokens of a head it is said how often they hold the right one


@dataclass(frozen=True)
class HeadAccuracy(Record):
    """How often a head's k best tokens hold the token of the text, over all block starts, drafted from or not.

    Head `head` reads the state that produced token t+1 and predicts token t+2+head. By k of `top`: `accuracy`, and its
    95 % bootstrap interval over prompts. `num_tokens` 0: no text was long enough.
    """

    head: int
    num_tokens: int
    top: list[int]
    accuracy: list[float]
    intervals: list[list[float]]


@dataclass(frozen=True)
class DraftShape(Record):
    """A chain or a tree of heads' candidates, as paths of ranks (tree.py), with τ of greedy replay and its interval.

    Of a tree τ is cross-fitted: each half of the prompts is replayed with the tree found on the other half. `replayed`
    is τ of this very tree on all prompts; what it was chosen by, so optimistic. Of a chain both are the same.
    """

    kind: str  # "chain" or "tree"
    paths: list[list[int]]
    mean_accepted_length: float
    mean_accepted_length_interval: list[float]
    replayed_mean_accepted_length: float

    @property
    def num_nodes(self) -> int:
        return len(self.paths)


@dataclass(frozen=True)
class VerifyCost(Record):
    """A target pass over `num_tokens[i]` new tokens of each of `batch_size` texts, in steps of one token at that size.

    `step_seconds`: seconds of that step.
    """

    batch_size: int
    step_seconds: float
    num_tokens: list[int]
    ratios: list[float]


@dataclass(frozen=True)
class ShapeSpeed(Record):
    """Predicted speed over the target alone of one of the shapes, τ / (verify cost + draft cost), costs in steps."""

    batch_size: int
    kind: str
    num_nodes: int
    verify_cost_ratio: float
    draft_cost_ratio: float
    predicted_speedup: float


@dataclass(frozen=True)
class HeadsReport(Record):
    """Draft heads by themselves: accuracies, the chains and trees that they can serve, and which is fastest where.

    `recommended` holds the best of `speeds` at each batch size; `chain_length` the best chain at the smallest, which
    is what an engine without trees is given.
    """

    hardware: str
    num_threads: int
    dtype: str
    num_prompts: int
    accuracies: list[HeadAccuracy]
    shapes: list[DraftShape]
    verify_costs: list[VerifyCost]
    speeds: list[ShapeSpeed]
    recommended: list[ShapeSpeed]
    chain_length: int

    @property
    def draft_tree(self) -> DraftShape | None:
        """The tree that is saved with the heads: that with the highest predicted speed at the smallest batch size.

        None where the target verifies no trees.
        """
        smallest = min(speed.batch_size for speed in self.speeds)
        trees = [speed for speed in self.speeds if speed.kind == "tree" and speed.batch_size == smallest]
        best = max(trees, key=lambda speed: speed.predicted_speedup, default=None)
        return None if best is None else self.shape("tree", best.num_nodes)

    def shape(self, kind: str, num_nodes: int) -> DraftShape:
        """The chain or tree of so many nodes. Raises KeyError where there is none."""
        return {(shape.kind, shape.num_nodes): shape for shape in self.shapes}[kind, num_nodes]
