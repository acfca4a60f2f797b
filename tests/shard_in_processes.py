"""Started by test_draft_training.py in two processes: a draft sharded by FSDP2 against the same one in whole.

Each process has rows of its own; the sharded gradient must be the mean of both processes' gradients.
"""

import itertools
import os

import torch
import torch.distributed as dist
from conftest import make_tiny_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from specdist.fused_losses import linear_objective
from specdist.losses import Objective
from specdist.target import output_projection

OBJECTIVE = Objective({"cross_entropy": 1.0})


def loss(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    output = model(input_ids=ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    hidden = output.hidden_states[-1][:, :-1].flatten(0, 1)
    return linear_objective(hidden, output_projection(model, model.config), ids[:, 1:].flatten(), OBJECTIVE)[0]


def draft(tied: bool) -> torch.nn.Module:
    model = make_tiny_llama(64)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def main() -> None:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    batches = [torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    for tied, reshard in itertools.product((False, True), (False, True)):
        whole = draft(tied)
        (sum(loss(whole, batch) for batch in batches) / 2).backward()
        sharded = draft(tied)
        mesh = init_device_mesh("cpu", (2,))
        for layer in sharded.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh, reshard_after_forward=reshard)  # True: the projection is gathered for the loss
        loss(sharded, batches[rank]).backward()
        expected = dict(whole.named_parameters())
        for name, parameter in sharded.named_parameters():
            assert isinstance(parameter.grad, DTensor), name
            torch.testing.assert_close(parameter.grad.full_tensor(), expected[name].grad, atol=1e-4, rtol=1e-4)
    dist.barrier()  # a process that ends while the other still speaks to it would abort that one
    dist.destroy_process_group()
    os._exit(0)  # all was asserted; at the interpreter's end threads of the sharding at times abort the process


if __name__ == "__main__":
    main()
