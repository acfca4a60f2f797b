"""Draft lengths: what each policy makes of accepted shares and seconds, and that none of them changes the output."""

import time

import pytest
import torch
from test_decoding import EOS, VOCAB, make_drafter, make_scorer, prompts, target_model
from test_decoding import eval_set as make_eval_set

from specdist.decoding.loop import decode
from specdist.decoding.policies import Block, ByAcceptance, ByLastBlock, DraftLengthPolicy, FixedLength, WhileItPays
from specdist.drafters.base import DecodeContext, Proposal
from specdist.drafters.ngram import NgramDrafter
from specdist.errors import ConfigError
from specdist.schema import SamplingSpec

GREEDY = SamplingSpec(max_new_tokens=32)


def play(policy: DraftLengthPolicy, shares: list[float], seconds: float = 1.0) -> list[int]:
    """The lengths that `policy` chooses while blocks have these shares accepted."""
    lengths = []
    for share in shares:
        lengths.append(policy.draft_length())
        policy.update(Block(lengths[-1], round(share * lengths[-1]), seconds))
    return lengths


def test_by_last_block_is_one_longer_above_0_8_and_one_shorter_below_0_4() -> None:
    assert play(ByLastBlock(), [1, 1, 0.5, 0, 1]) == [4, 5, 6, 6, 5]
    assert play(ByLastBlock(), [0.8] + [0.4] * 3) == [4] * 4  # .75, then .5: between the two
    assert play(ByLastBlock(start=2, shortest=1, longest=3), [1, 1, 1, 0, 0, 0, 0]) == [2, 3, 3, 3, 2, 1, 1]
    policy = ByLastBlock()
    policy.update(Block(0, 0, 1.0))
    assert policy.draft_length() == 4, "a step of the target alone says nothing"


def test_by_acceptance_moves_when_a_whole_window_lies_outside_the_band() -> None:
    assert play(ByAcceptance(), [1.0] * 46) == [4] * 25 + [5] * 20 + [6]  # 100 tokens each
    assert play(ByAcceptance(), [0.3] * 60) == [4] * 25 + [3] * 34 + [2]
    assert set(play(ByAcceptance(), [0.75] * 200)) == {4}
    assert play(ByAcceptance(), [0.0] * 300)[-1] == 2
    assert play(ByAcceptance(), [1.0] * 300)[-1] == 8


def test_by_acceptance_forgets_what_lies_before_its_window() -> None:
    policy = ByAcceptance(window=20)
    assert set(play(policy, [0.75] * 100)) == {4}
    assert play(policy, [1.0] * 2) == [4, 4]  # of the last 20 tokens 17 were accepted: 0.85 is within the band
    assert play(policy, [1.0] * 2) == [4, 5]


def test_drafting_that_takes_longer_than_it_saves_is_turned_off_and_tried_again() -> None:
    policy = WhileItPays(FixedLength(3), probe=2, trial=3, pause=5, refresh=2)
    used = []
    for accepted in [0] * 2 + [1] * 3 + [0] * 5 + [3] * 6 + [0] * 2 + [3]:
        length = policy.draft_length()
        used.append(length)
        policy.update(Block(length, min(length, accepted), 2.5 if length else 1.0))
    # two alone; a trial of 2.5 s for 2 tokens; five alone; two trials of 2.5 s for 4; what a step costs, again
    assert used == [0, 0, 3, 3, 3, 0, 0, 0, 0, 0, 3, 3, 3, 3, 3, 3, 0, 0, 3]


def test_one_disturbed_step_does_not_turn_drafting_off() -> None:
    policy = WhileItPays(FixedLength(3), probe=1, trial=5, pause=5)
    policy.update(Block(0, 0, 1.0))
    for seconds in (30.0, 1.2, 1.2, 1.2, 1.2):
        policy.update(Block(3, 1, seconds))
    assert policy.draft_length() == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ByLastBlock(start=9), "first 9"),
        (lambda: ByAcceptance(shortest=0), "from 0 to 8"),
        (lambda: WhileItPays(FixedLength(2), trial=0), "trial 0"),
    ],
)
def test_lengths_out_of_order_are_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


POLICIES = {
    "fixed": lambda: FixedLength(3),
    "last-block": ByLastBlock,
    "acceptance": lambda: ByAcceptance(window=8),
    "confidence": lambda: FixedLength(6, confidence_threshold=0.4),
    "pays": lambda: WhileItPays(ByLastBlock(), probe=1, trial=2, pause=3),
}


@pytest.mark.parametrize("name", POLICIES)
def test_e5_greedy_output_is_the_targets_own_with_every_policy_and_drafter(name: str) -> None:
    target = target_model()
    drafters = [make_drafter("draft_model", target), make_drafter("medusa", target), NgramDrafter()]
    texts = prompts(3)
    plain = [decode(target, p, GREEDY, EOS).completion_ids for p in texts]
    for drafter in drafters:
        policy = POLICIES[name]()
        fast = [decode(target, p, GREEDY, EOS, drafter=drafter, policy=policy) for p in texts]
        assert [r.completion_ids for r in fast] == plain
        lengths = {n for r in fast for n in r.draft_lengths()}
        assert lengths <= set(range(9))
        assert name == "fixed" or len(lengths) > 1
        assert all(sum(r.draft_lengths().values()) == len(r.steps) for r in fast)


class Alternating:
    """Drafts three tokens in every third step, none between."""

    confidence_threshold = 0.0

    def __init__(self) -> None:
        self.steps = 0

    def draft_length(self) -> int:
        return 0 if self.steps % 3 else 3

    def update(self, block: Block) -> None:
        self.steps += 1


@pytest.mark.parametrize("kind", ["draft_model", "medusa"])
def test_a_drafter_that_is_left_out_for_some_steps_goes_on_as_if_it_had_not_been(kind: str) -> None:
    """What it drafts afterwards is what replay says it drafts there: nothing stale is left in its cache."""
    target = target_model()
    drafter, texts = make_drafter(kind, target), prompts(5)
    results = [decode(target, p, GREEDY, EOS, drafter=drafter, policy=Alternating()) for p in texts]
    accepted = 0
    for text, result in zip(make_eval_set(target, GREEDY, results, texts).texts, results, strict=True):
        accept = make_scorer(drafter, target).accept(text, GREEDY)["greedy"]
        for step in result.steps:
            run = int(accept[step.start, : step.drafted].cumprod(dim=0).sum())
            assert step.accepted == run
            accepted += run
    assert accepted > 2


def test_a_block_ends_after_the_first_token_that_the_draft_is_not_sure_of() -> None:
    target = target_model()
    drafter, prompt = make_drafter("draft_model", target), prompts(1)[0]
    drafter.reset()
    context = DecodeContext(list(prompt), None, torch.Generator())
    whole = drafter.propose(context, 8).token_ids.tolist()
    with torch.inference_mode():
        logits = drafter.model(torch.tensor([prompt + whole])).logits[0, len(prompt) - 1 : -1, :VOCAB]
    confidence = logits.softmax(-1).max(-1).values.tolist()
    threshold = sorted(confidence)[3]
    drafter.reset()
    context = DecodeContext(list(prompt), None, torch.Generator(), confidence_threshold=threshold)
    expected = next(i + 1 for i, value in enumerate(confidence) if value < threshold - 1e-6)
    assert drafter.propose(context, 8).token_ids.tolist() == whole[:expected]
    assert expected < 8


class SlowAndWrong:
    """Takes its time, and drafts one and the same token."""

    max_draft_tokens, tree = None, None

    def __init__(self, token: int) -> None:
        self.token = token

    def reset(self) -> None:
        pass

    def propose(self, context: DecodeContext, max_tokens: int) -> Proposal:
        time.sleep(0.02)
        return Proposal(torch.full((max_tokens,), self.token))

    def commit(self, num_committed: int, target_hidden: torch.Tensor) -> None:
        pass


def test_a_drafter_that_does_not_pay_by_the_clock_is_left_out() -> None:
    target, prompt = target_model(), prompts(1)[0]
    absent = min(set(range(VOCAB)) - set(decode(target, prompt, GREEDY, []).completion_ids))
    policy = WhileItPays(FixedLength(2), probe=3, trial=4, pause=100)
    result = decode(target, prompt, GREEDY, [], drafter=SlowAndWrong(absent), policy=policy)
    assert result.draft_lengths() == {0: 27, 2: 4}
    assert not policy.drafting
