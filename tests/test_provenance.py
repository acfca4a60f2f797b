"""How a result was made: the commit of this package's own checkout alone, and no secret of a command line."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specdist import provenance
from specdist.errors import ConfigError
from specdist.generation.http_json import JsonServer


def git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("inside", ["", ".venv/lib/site-packages"])
def test_the_commit_is_that_of_the_packages_own_checkout(tmp_path: Path, inside: str) -> None:
    """Installed into the environment of another project, it must not give out that project's commit as its own."""
    installed = tmp_path / inside
    (installed / "specdist").mkdir(parents=True)
    for name in ("__init__.py", "provenance.py", "errors.py", "redaction.py"):
        shutil.copyfile(Path(provenance.__file__).with_name(name), installed / "specdist" / name)
    git(tmp_path, "init")
    (tmp_path / ".gitignore").write_text(".venv\n__pycache__\n")
    git(tmp_path, "add", "--all")
    git(tmp_path, "commit", "--message", "x")
    script = "from specdist.provenance import git_commit; print(git_commit())"
    found = subprocess.run([sys.executable, "-B", "-c", script], cwd=installed, capture_output=True, text=True).stdout
    assert found.strip() == ("None" if inside else git(tmp_path, "rev-parse", "HEAD"))


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (["--hub_token", "SECRET", "--seed", "3"], ["--hub_token", "***", "--seed", "3"]),
        (["--hub-token=SECRET"], ["--hub-token=***"]),
        (["--hub_token", "--seed", "3"], ["--hub_token", "--seed", "3"]),
        (["--eos_token", "<end>", "--max_new_tokens", "7"], ["--eos_token", "<end>", "--max_new_tokens", "7"]),
        (["--mlflow_tracking_uri=https://me:SEC@RET@ml:80/a@b"], ["--mlflow_tracking_uri=https://ml:80/a@b"]),
        (["--server_urls", "http://u:SECRET@a", "http://b:80"], ["--server_urls", "http://a", "http://b:80"]),
        (["--train_prompts", "org/data@main:train"], ["--train_prompts", "org/data@main:train"]),
    ],
)
def test_a_recorded_command_line_holds_no_secret(
    monkeypatch: pytest.MonkeyPatch, given: list[str], recorded: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/recipe.py", *given])
    assert provenance.provenance()["argv"] == ["recipe.py", *recorded]


def test_an_endpoint_is_named_without_its_password() -> None:
    assert JsonServer("http://me:SECRET@host:8000/v1/").url == "http://host:8000"
    with pytest.raises(ConfigError) as error:
        JsonServer("ftp://me:SECRET@host")
    assert "SECRET" not in str(error.value)


@pytest.mark.parametrize("make", [provenance.atomic_path, provenance.atomic_directory])
def test_what_is_written_can_be_read_by_those_whom_the_umask_lets(
    tmp_path: Path, make: Callable[[Path], AbstractContextManager[Path]]
) -> None:
    """A server may run as somebody else; safetensors writes files that their owner alone can read."""
    with make(tmp_path / "new") as temporary:
        file = temporary / "model.safetensors" if temporary.is_dir() else temporary
        save_file({"weight": torch.zeros(2)}, file)
    written = tmp_path / "new" / "model.safetensors" if (tmp_path / "new").is_dir() else tmp_path / "new"
    (tmp_path / "usual").write_text("")
    assert written.stat().st_mode & 0o444 == (tmp_path / "usual").stat().st_mode & 0o444
