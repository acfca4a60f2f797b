"""What the target is given of a batch, and where its states and projection lie when it is spread over devices."""

import pytest
import torch
from conftest import make_tiny_llama
from draft_factory import examples
from torch._subclasses.fake_tensor import FakeTensorMode

from specdist.losses import Projection
from specdist.training.batches import DraftCollator
from specdist.training.target_output import TargetOutput, final_states, model_inputs

PACKS = [{"members": [0, 1, 2]}, {"members": [3, 4]}, {"members": []}, {"members": [5]}]
EXAMPLES = examples([(4, 9), (11, 3), (2, 6), (7, 9), (1, 2), (1, 4)])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_m13_states_of_several_packs_are_those_of_each_document_alone(attention: str) -> None:
    model = make_tiny_llama(268)
    model.set_attn_implementation(attention)
    batch = DraftCollator(EXAMPLES, 0, packed=True)(PACKS)
    assert batch["input_ids"].shape == (3, 35)
    everything = torch.cat([b * 35 + torch.arange(length) for b, length in enumerate((35, 19, 5))])
    with torch.inference_mode():
        alone = [model.base_model(torch.tensor([row["input_ids"]])).last_hidden_state[0] for row in EXAMPLES]
        torch.testing.assert_close(final_states(model, batch, everything), torch.cat(alone))


def test_m13_flash_attention_gets_all_packs_in_one_row() -> None:
    """It keeps documents apart by their positions within one row alone."""
    model = make_tiny_llama(268)
    batch = DraftCollator(EXAMPLES, 0, packed=True)(PACKS)
    assert model_inputs(batch, model.config).keys() == {"input_ids", "position_ids"}
    model.config._attn_implementation = "flash_attention_2"
    for name, tensor in model_inputs(batch, model.config).items():
        assert torch.equal(tensor, batch[name].flatten()[None]), name
    rows = DraftCollator(EXAMPLES, 0)([{"members": [0]}, {"members": [1]}])
    assert torch.equal(model_inputs(rows, model.config)["input_ids"], rows["input_ids"])


def test_c10_a_projection_on_the_last_of_several_devices_is_brought_to_where_training_is() -> None:
    """Tensors without values stand for two GPUs: an operation on tensors of both is an error, as on real ones."""
    first, last = torch.device("cuda:0"), torch.device("cuda:1")
    with FakeTensorMode():
        projection = Projection(torch.empty(40, 8, device=last), torch.empty(40, device=last), scale=0.5, softcap=30.0)
        states = torch.empty(6, 8, device=first)
        brought = TargetOutput(projection).on(first).projection
        assert brought.logits(torch.mm(states, brought.weight.T)).device == first
        assert (brought.scale, brought.softcap) == (0.5, 30.0)
        with pytest.raises(RuntimeError, match="device"):
            torch.mm(states, projection.weight.T)
