"""Owns what every trainer here asks of its arguments, and of the processes that it runs in."""

import logging

from accelerate.utils import parse_flag_from_env
from transformers import TrainingArguments

from specdist.errors import ConfigError

logger = logging.getLogger(__name__)


def check_arguments(arguments: TrainingArguments, *, on_policy: bool = False) -> None:
    """Raise ConfigError on what no trainer here can honour, before there is work to lose.

    `on_policy`: whether the draft writes answers while it learns.
    """
    if not arguments.average_tokens_across_devices:
        raise ConfigError(
            "average_tokens_across_devices = false: a token would weigh more in a process that has few; every mean is "
            "over the tokens of all processes, so leave it out"
        )
    if on_policy and (arguments.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")):
        raise ConfigError(
            "on_policy_share with FSDP: all processes must run a sharded draft equally often, but some end their "
            "answers earlier, and the others would wait for ever; use accelerate_configs/ddp.yaml, or leave it out"
        )


def settle_arguments(arguments: TrainingArguments, *, on_policy: bool = False) -> None:
    """Set, in place, what a trainer here needs: one device per process, and batches as the collator makes them.

    With more GPUs in sight a process alone would copy the model to each, batch by batch (DataParallel), where neither
    objective nor counts are known. Raises as `check_arguments`.
    """
    check_arguments(arguments, on_policy=on_policy)
    arguments.remove_unused_columns = False
    if arguments.n_gpu > 1:
        logger.warning(
            "%d GPUs are in sight and one process trains, on %s alone; accelerate launch --num_processes %d trains on "
            "all of them, unless the target is spread over them",
            arguments.n_gpu,
            arguments.device,
            arguments.n_gpu,
        )
        arguments._n_gpu = 1  # as transformers itself does for a model on several devices
