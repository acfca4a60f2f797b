"""Owns the checkpoints of a run on disk: which are complete, which is the best, which may go, when to train no more.

Everything is derived from what lies on disk, so a run that was killed and resumed decides as one that was not.
`lower_bounds` is, by step, the lower 95 % confidence bound of the mean accepted length of each measured checkpoint.
"""

import logging
import shutil
import zipfile
from pathlib import Path

from specdist import provenance
from specdist.errors import ArtifactError
from specdist.safetensors_file import read_header

logger = logging.getLogger(__name__)

COMPLETE_FILE = "complete.json"
_RESUME_ONLY_FILES = ("optimizer.pt", "optimizer.bin", "scheduler.pt")


def checkpoint_path(directory: Path, step: int) -> Path:
    """Where the trainer puts the checkpoint of a step."""
    return directory / f"checkpoint-{step}"


def checkpoint_step(checkpoint: Path) -> int:
    """The global step in a checkpoint's name."""
    return int(checkpoint.name.split("-")[-1])


def complete_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints that were written to their end, in the order of their steps."""
    found = [p for p in directory.glob("checkpoint-*") if (p / COMPLETE_FILE).exists()]
    return sorted(found, key=checkpoint_step)


def last_complete_checkpoint(directory: Path, *, is_main_process: bool) -> Path | None:
    """The checkpoint to resume from: the newest whose files are whole. Later ones, and what a killed run left
    half-written, are removed by the main process.

    Raises ArtifactError where later ones are cut and this one has no optimizer state, so that training would go on
    with another learning rate.
    """
    complete, faults = complete_checkpoints(directory), []
    while complete and (fault := _fault(complete[-1])):
        faults.append(fault)
        complete.pop()
    if faults and complete and not any((complete[-1] / name).exists() for name in _RESUME_ONLY_FILES):
        raise ArtifactError(
            f"{'; '.join(faults)}; {complete[-1]} before has no optimizer state to go on with: restore the file, or "
            f"delete {directory} to train anew"
        )
    if is_main_process:
        for fault in faults:
            logger.warning("%s; training goes on from %s", fault, complete[-1] if complete else "its start")
        for path in directory.glob("checkpoint-*"):
            if path not in complete:
                logger.info("removing %s, which is incomplete", path)
                shutil.rmtree(path)
    return complete[-1] if complete else None


def _fault(checkpoint: Path) -> str | None:
    """What is wrong with the files of a checkpoint, None where they are whole."""
    try:
        for file in sorted(checkpoint.rglob("*.safetensors")):
            read_header(file, "a copy of it is needed")
    except ArtifactError as error:
        return str(error)
    saved = [file for file in sorted(checkpoint.iterdir()) if file.suffix in (".pt", ".pth", ".bin")]
    cut = [file for file in saved if not zipfile.is_zipfile(file)]  # torch.save writes zip files, whose end is an index
    return f"{cut[0]}: truncated ({cut[0].stat().st_size} bytes)" if cut else None


def mark_complete(checkpoint: Path) -> None:
    """Say that a checkpoint was written to its end. All but it and the one before lose what only resuming needs."""
    provenance.write_json(checkpoint / COMPLETE_FILE, {"step": checkpoint_step(checkpoint)})
    for earlier in complete_checkpoints(checkpoint.parent)[:-2]:
        for name in _RESUME_ONLY_FILES:
            (earlier / name).unlink(missing_ok=True)


def best_step(lower_bounds: dict[int, float]) -> int:
    """The step with the highest lower bound, the earliest of equals. Raises ValueError where nothing was measured."""
    return max(sorted(lower_bounds), key=lambda step: lower_bounds[step])


def is_stalled(lower_bounds: dict[int, float], patience: int) -> bool:
    """Whether the last `patience` measured checkpoints brought no better lower bound; never with patience 0."""
    if patience == 0 or not lower_bounds:
        return False
    best = best_step(lower_bounds)
    return sum(step > best for step in lower_bounds) >= patience


def rotate(directory: Path, lower_bounds: dict[int, float], limit: int | None) -> None:
    """Delete the oldest complete checkpoints over `limit`, but never the best nor the newest, so two may stay.

    A checkpoint that a kill leaves half-deleted has lost its mark first, and so counts as incomplete.
    """
    complete = complete_checkpoints(directory)
    if not limit or not complete:
        return
    best = best_step(lower_bounds) if lower_bounds else None
    spare = [path for path in complete[:-1] if checkpoint_step(path) != best]
    for path in spare[: max(0, len(complete) - limit)]:
        (path / COMPLETE_FILE).unlink()
        provenance.sync_directory(path)
        shutil.rmtree(path)
