"""Owns the checkpoints of a run on disk: which are complete, which is the best, which may go, when to train no more.

Everything is derived from what lies on disk, so a run that was killed and resumed decides as one that was not.
`lower_bounds` is, by step, the lower 95 % confidence bound of the mean accepted length of each measured checkpoint.
"""

import logging
import shutil
from pathlib import Path

from specdist import provenance
from specdist.errors import ArtifactError
from specdist.training.finite import check_weights

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
    """The newest checkpoint from which training goes on exactly: no file that it was saved with is missing or cut.

    What cannot be resumed and is newer is removed by the main process, as what a killed run left half-written.
    Raises ArtifactError where there are complete checkpoints and training can go on from none.
    """
    complete = complete_checkpoints(directory)
    whole = [path for path in complete if not _lost(path)]
    if complete and not whole:
        raise ArtifactError(
            f"{complete[-1]}: checkpoint incomplete: {'; '.join(_lost(complete[-1])[:3])}; training cannot go on from "
            "it, and earlier checkpoints do not keep what that needs. Restore what is missing, or delete "
            f"{directory} to train again"
        )
    if is_main_process:
        kept = complete[: complete.index(whole[-1]) + 1] if whole else []
        for path in complete[len(kept) :]:
            logger.warning("%s: %s; training goes on from %s", path, "; ".join(_lost(path)[:3]), whole[-1])
        for path in directory.glob("checkpoint-*"):
            if path not in kept:
                logger.info("removing %s, which is incomplete", path)
                shutil.rmtree(path)
    return whole[-1] if whole else None


def _lost(checkpoint: Path) -> list[str]:
    """What a complete checkpoint lacks of the files that it was saved with, in words."""
    mark, found = checkpoint / COMPLETE_FILE, _sizes(checkpoint)
    saved = provenance.read_json(mark).get("files")
    if saved is None:
        return [f"{mark} does not list its files, since an older version wrote it"]
    return [
        f"{name}, expected {size} bytes, found {found.get(name, 'no file')}"
        for name, size in saved.items()
        if found.get(name) != size
    ]


def _sizes(checkpoint: Path) -> dict[str, int]:
    """Bytes of each file by its path in the checkpoint."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.name != COMPLETE_FILE)
    return {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}


def mark_complete(checkpoint: Path) -> None:
    """Say that a checkpoint was written to its end. All but it and the one before lose what only resuming needs.

    Raises NotFinite where it holds a weight that is NaN or infinite: it stays incomplete then.
    """
    check_weights(checkpoint)
    record = {"step": checkpoint_step(checkpoint), "files": _sizes(checkpoint)}
    provenance.write_json(checkpoint / COMPLETE_FILE, record)
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


def is_last(checkpoint: Path) -> bool:
    """Whether training was at its end there: the trainer, resumed at its last step, would take one more."""
    state = provenance.read_json(checkpoint / "trainer_state.json")
    return bool(state["global_step"] >= state["max_steps"])


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
