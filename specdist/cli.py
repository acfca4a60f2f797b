"""Owns the command `specdist`: trying a drafter, advice, data, reports, exports. Its registry is in cli_registry.py.

Everything else is a recipe.

Heavy packages are imported by the library when a command needs them, so `--help` and `registry path` are instant.
"""

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdist import config
from specdist.cli_arguments import count, new_file, seconds, some_text, text
from specdist.cli_registry import add_registry_commands, write_line
from specdist.decoding.policies import POLICIES
from specdist.drafter_config import DraftArguments
from specdist.errors import ArtifactError, ConfigError, SpecdistError
from specdist.provenance import write_json
from specdist.schema import SamplingSpec

if TYPE_CHECKING:
    from specdist.export.record import ExportRecord


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, or 2 with the reason on stderr.

    As of other commands, 130 where it was interrupted, and 141 where the reader of the answer went away (`| head`).
    """
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at the very end
        return 141
    except (SpecdistError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("\n")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specdist", description="Try drafters, look at data and reports, export.")
    groups = parser.add_subparsers(required=True, metavar="GROUP")
    _add_data_commands(groups.add_parser("data", help="datasets of the target's answers"))
    _add_advise(groups.add_parser("advise", help="is this draft worth training? Costs measured, speed-up predicted"))
    _add_export(groups.add_parser("export", help="write an export as one engine reads it, or say why it would not"))
    _add_import(groups.add_parser("import", help="read Medusa heads trained elsewhere, and write them as an export"))
    _add_decode(groups.add_parser("decode", help="an answer as it is decoded, accepted drafts in colour, and counters"))
    _add_sync(groups.add_parser("sync", help="send to W&B what runs left in the outbox while it could not be reached"))
    _add_report(groups.add_parser("report", help="the page of one drafter, or of several and which of them to serve"))
    _add_compare(groups.add_parser("compare", help="two drafters on the same prompts: differences with intervals"))
    add_registry_commands(groups.add_parser("registry", help="published versions and the champion that serves"))
    return parser


_NAMED_REPORT = "a report, a directory with one (a run, a version), or MODEL[@N] of the registry"


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("drafters", metavar="DRAFTER", nargs="+", help=_NAMED_REPORT)
    command.add_argument("--html", type=new_file, default=Path("report.html"), help="the page (default: %(default)s)")
    command.add_argument("--png", type=Path, metavar="DIRECTORY", help="write the pictures there too")
    command.add_argument("--root", type=Path, default=Path("runs/registry"), help="the registry (default: %(default)s)")
    command.set_defaults(run=_report)


def _add_compare(command: argparse.ArgumentParser) -> None:
    command.add_argument("first", metavar="A", help=_NAMED_REPORT)
    command.add_argument("second", metavar="B", help="the same; differences are B less A")
    command.add_argument("--html", type=new_file, default=Path("compare.html"), help="the page (default: %(default)s)")
    command.add_argument("--root", type=Path, default=Path("runs/registry"), help="the registry (default: %(default)s)")
    command.set_defaults(run=_compare)


def _add_decode(command: argparse.ArgumentParser) -> None:
    command.add_argument("prompt", type=text, metavar="PROMPT", nargs="?", help="default: read from standard input")
    command.add_argument("--target", metavar="MODEL", required=True, help="Hugging Face id or directory")
    drafts = command.add_mutually_exclusive_group()
    drafts.add_argument("--drafter", metavar="DRAFTER", help="a run, an export, or MODEL[@N] of the registry")
    drafts.add_argument("--ngram", action="store_true", help="look up in the text itself; neither: the target alone")
    command.add_argument("--tree", action="store_true", help="verify the draft tree that lies with the heads")
    command.add_argument("--num-speculative-tokens", type=int, metavar="N", help="default: the export's")
    command.add_argument("--policy", choices=POLICIES, default="fixed", help="of draft lengths (default: %(default)s)")
    for name in ("temperature", "top_p", "top_k", "min_p", "max_new_tokens"):
        value = getattr(SamplingSpec, name)
        option = f"--{name.replace('_', '-')}"
        command.add_argument(option, type=type(value), default=value, metavar="X", help="(default: %(default)s)")
    command.add_argument("--seed", type=count, default=0, help="of sampling (default: %(default)s)")
    command.add_argument("--system", type=text, metavar="TEXT", help="system prompt")
    command.add_argument(
        "--stop", type=some_text, action="append", default=[], metavar="TEXT", help="ends the answer; any number"
    )
    command.add_argument("--dtype", choices=config.DTYPES, default="bfloat16", help="(default: %(default)s)")
    command.add_argument(
        "--beside-target", action="store_true", help="then the target alone: speed, and the same text?"
    )
    command.add_argument("--no-color", action="store_true", help="also where NO_COLOR is set, or stdout is no terminal")
    command.add_argument("--root", type=Path, default=Path("runs/registry"), help="the registry (default: %(default)s)")
    command.set_defaults(run=_decode)


def _read_prompt() -> str:
    try:
        return sys.stdin.read().rstrip("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt on standard input: not UTF-8 ({error}); give text in UTF-8") from None


def _decode(arguments: argparse.Namespace) -> None:
    from transformers.utils.logging import disable_progress_bar

    from specdist.stages.decode import DecodeRequest, decode_prompt
    from specdist.stages.named_drafter import DrafterChoice

    disable_progress_bar()
    given = vars(arguments)
    request = DecodeRequest(
        arguments.target,
        _read_prompt() if arguments.prompt is None else arguments.prompt,
        DrafterChoice(
            arguments.drafter, arguments.ngram, arguments.tree, arguments.num_speculative_tokens, arguments.root
        ),
        SamplingSpec(**{field.name: given[field.name] for field in dataclasses.fields(SamplingSpec)}),
        policy=arguments.policy,
        system_prompt=arguments.system,
        stop=arguments.stop,
        dtype=arguments.dtype,
        seed=arguments.seed,
        beside_target=arguments.beside_target,
    )
    colour = sys.stdout.isatty() and not arguments.no_color and not os.environ.get("NO_COLOR")
    decode_prompt(request, sys.stdout, sys.stderr, colour=colour)


def _add_sync(command: argparse.ArgumentParser) -> None:
    command.add_argument("--root", type=Path, default=Path("runs/registry"), help="the registry (default: %(default)s)")
    command.add_argument(
        "--wandb-registry",
        default="model",
        help='W&B Registry for what was promoted, "" for none (default: %(default)s)',
    )
    command.add_argument("--seconds", type=seconds, default=600.0, help="longest for one entry (default: %(default)s)")
    command.set_defaults(run=_sync)


def _add_data_commands(data: argparse.ArgumentParser) -> None:
    commands = data.add_subparsers(required=True, metavar="COMMAND")
    directory = argparse.ArgumentParser(add_help=False)
    directory.add_argument("directory", metavar="DIR", type=Path, help="a finished dataset, runs/…/data/<fingerprint>")

    command = commands.add_parser(
        "show", parents=[directory], help="the manifest, and rows with what is learned in green"
    )
    command.add_argument("--rows", type=count, default=3, help="how many rows (default: %(default)s)")
    command.add_argument("--target", help="whose tokenizer decodes them (default: the manifest's, if it can be found)")
    command.set_defaults(run=_data_show)
    command = commands.add_parser("validate", parents=[directory], help="hash the shards and check every row again")
    command.set_defaults(run=_data_validate)


def _add_export(command: argparse.ArgumentParser) -> None:
    command.add_argument("--format", required=True, choices=("vllm", "tgi", "original"), help="who reads it")
    command.add_argument("--target", metavar="MODEL", help="compared with the export's; TGI finds it by this name")
    command.add_argument("drafter", metavar="DRAFTER", type=Path, help="an export, a registry's version, or a run")
    command.add_argument("output", metavar="OUTPUT", type=Path, help="a new directory")
    command.set_defaults(run=_export)


def _add_import(command: argparse.ArgumentParser) -> None:
    command.add_argument("--target", metavar="MODEL", required=True, help="the model that the heads were trained on")
    command.add_argument("source", metavar="SOURCE", type=Path, help="a file, or a directory with config.json beside")
    command.add_argument("output", metavar="OUTPUT", type=Path, help="a new directory")
    command.set_defaults(run=_import)


def _add_advise(command: argparse.ArgumentParser) -> None:
    command.add_argument("--config", type=Path, metavar="YAML", help="a draft recipe's; the keys below go before it")
    command.add_argument("--target", metavar="MODEL", help="target_model: Hugging Face id or directory")
    command.add_argument("--init", metavar="MODEL", help="a draft model, or prune")
    command.add_argument("--draft_layers", type=int, nargs="+", metavar="N", help="for prune: layers to keep")
    command.add_argument("--dtype", choices=config.DTYPES, help="target_dtype: in which both are timed")
    command.add_argument("--json", type=new_file, metavar="FILE", help="write the numbers there as well")
    command.add_argument(
        "--measured", type=Path, metavar="RUN", help="a finished run's directory: time its export beside the prediction"
    )
    command.set_defaults(run=_advise)


def _advise_settings(
    arguments: argparse.Namespace,
) -> tuple[config.TargetArguments, DraftArguments, config.DataArguments]:
    """What the YAML file says, a finished run's own where only that is named, and the command line before both."""
    target, draft, data = config.TargetArguments(), DraftArguments(), config.DataArguments()
    path = arguments.config or (arguments.measured and arguments.measured / "run.yaml")
    if path:
        from trl import SFTConfig

        from specdist.stages.arguments import parse

        read = parse(DraftArguments, SFTConfig, default_config="", arguments=["--config", str(path)])
        target, draft, data = read.target, read.model, read.data
    elif not arguments.target:
        raise ConfigError("advise: name a --target, or a recipe's --config")
    given = {"target_model": arguments.target, "target_dtype": arguments.dtype}
    target = dataclasses.replace(target, **{key: value for key, value in given.items() if value})
    given = {"init": arguments.init, "draft_layers": arguments.draft_layers}
    return target, dataclasses.replace(draft, **{key: value for key, value in given.items() if value}), data


def _advise(arguments: argparse.Namespace) -> None:
    from transformers.utils.logging import disable_progress_bar

    from specdist.evaluation.fit_table import fit_json, fit_lines
    from specdist.stages.advise import compare_with_run, draft_fit
    from specdist.target import open_target

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    disable_progress_bar()
    target_arguments, draft, data = _advise_settings(arguments)
    target = open_target(target_arguments.target_model)
    fit = draft_fit(target, target_arguments, draft)
    for line in fit_lines(fit):
        write_line(line)
    if arguments.json:
        write_json(arguments.json, fit_json(fit))
    if arguments.measured:
        for line in compare_with_run(fit, target, target_arguments, arguments.measured, Path(data.data_dir)):
            write_line(line)


def _export(arguments: argparse.Namespace) -> None:
    from specdist.export.convert import convert
    from specdist.target import open_target

    target = open_target(arguments.target, chat=False) if arguments.target else None
    record = convert(arguments.drafter, arguments.output, arguments.format, target=target, base_model=arguments.target)
    _write_export(arguments.output, record)


def _import(arguments: argparse.Namespace) -> None:
    from specdist.export.imported import import_heads
    from specdist.target import open_target

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    target = open_target(arguments.target, chat=False)
    _write_export(arguments.output, import_heads(arguments.source, arguments.output, target))


def _write_export(directory: Path, record: "ExportRecord") -> None:
    write_line(f"{directory}: {record.drafter_kind} for {record.target.model_id}, {record.drafter_sha256[:12]}")
    for limit in record.known_limits:
        write_line(f"  {limit}")


def _report(arguments: argparse.Namespace) -> None:
    from specdist.stages.report import report

    for line in report(arguments.drafters, arguments.html, arguments.root, arguments.png):
        write_line(line)


def _compare(arguments: argparse.Namespace) -> None:
    from specdist.stages.compare import compare

    for line in compare(arguments.first, arguments.second, arguments.html, arguments.root):
        write_line(line)


def _sync(arguments: argparse.Namespace) -> None:
    from specdist.stages.sync import sync

    for line in sync(arguments.root, wandb_registry=arguments.wandb_registry, seconds=arguments.seconds):
        write_line(line)


def _data_show(arguments: argparse.Namespace) -> None:
    from specdist.dataset.manifest import read_manifest
    from specdist.dataset.show import manifest_lines, row_lines, sample_rows
    from specdist.target import load_tokenizer

    manifest = read_manifest(arguments.directory)
    for line in manifest_lines(manifest):
        write_line(line)
    tokenizer = None
    try:
        tokenizer = load_tokenizer(arguments.target or manifest.inputs.target.model_id)
    except SpecdistError as error:
        if arguments.target:
            raise
        write_line(f"\ntoken ids are shown, name the target with --target to see text ({error})")
    write_line("")
    for row in sample_rows(arguments.directory, arguments.rows):
        for line in row_lines(row, tokenizer, colour=sys.stdout.isatty()):
            write_line(line)


def _data_validate(arguments: argparse.Namespace) -> None:
    from specdist.dataset.validate import validate_dataset

    manifest, faults = validate_dataset(arguments.directory)
    if lines := faults.lines():
        raise ArtifactError(f"{arguments.directory}: not valid\n" + "\n".join(f"  {line}" for line in lines))
    write_line(f"{arguments.directory}: valid, {manifest.num_rows} rows in {len(manifest.shards)} shards")
