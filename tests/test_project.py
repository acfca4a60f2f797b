"""The repository as a whole: recipes' configurations, the README's tree, pins, shell scripts, sizes of files."""

import ast
import fnmatch
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted(p.name for p in (ROOT / "recipes").glob("*.py"))
# one folder per target; what lies beside the folders is shared by them and started by no command
CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*/*.yaml"))
LAUNCH_CONFIGS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
CODE = sorted(p for folder in ("specdist", "recipes") for p in (ROOT / folder).rglob("*.py"))
SHELL = [ROOT / ".ci" / "run", *sorted((ROOT / "scripts").glob("*.sh"))]
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_RECIPE_LINES = 400, 60, 150


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def first_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()[:3]


def test_there_is_something_to_check() -> None:
    assert RECIPES
    assert CONFIGS
    assert len(LAUNCH_CONFIGS) >= 5
    assert len(CODE) > 20
    assert len(SHELL) >= 4


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_recipe_config_starts_with_its_command(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text(encoding="utf-8")), dict)
    command = re.fullmatch(
        r"# accelerate launch(?: --config_file (?P<launch>\S+))? recipes/(?P<recipe>\S+) --config (?P<config>\S+)",
        first_lines(path)[0],
    )
    assert command, f"{name(path)}: the first line is not its accelerate command"
    assert command["config"] == name(path)
    assert command["recipe"] in RECIPES
    assert command["launch"] is None or (ROOT / command["launch"]).is_file()


@pytest.mark.parametrize("path", LAUNCH_CONFIGS, ids=name)
def test_launch_config_is_read_by_accelerate_and_shows_its_command(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(path)).num_processes >= 1
    use, command, _ = first_lines(path)
    assert use.startswith("# ")
    assert f"accelerate launch --config_file {name(path)} recipes/" in command
    assert (ROOT / command.split("--config ")[1]).is_file()


def test_readme_mentions_every_top_level_entry() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ignored = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").split()]
    entries = [
        p.name + "/" * p.is_dir()
        for p in ROOT.iterdir()
        if not p.name.startswith(".") and not any(fnmatch.fnmatch(p.name, pattern) for pattern in ignored)
    ]
    assert len(entries) >= 8
    assert [e for e in entries if e not in readme and e != "README.md"] == []


def test_every_dependency_has_a_tested_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    lines = (ROOT / "scripts" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    normal = {re.sub(r"[-_.]+", "-", pin.split("==")[0]).lower() for pin in pins}
    assert "torch==2.13.0" in pins
    assert [r for r in wanted if re.split(r"[<>=]", r)[0].lower() not in normal] == []


@pytest.mark.parametrize("path", SHELL, ids=name)
def test_shell_script_parses(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    # a file that is sourced lives by its caller's settings
    assert path.name == "environment.sh" or "\nset -euo pipefail\n" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", CODE, ids=name)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    limit = MAX_RECIPE_LINES if path.parent.name == "recipes" else MAX_FILE_LINES
    assert len(text.splitlines()) <= limit
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    sizes = {f.name: (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert {n: size for n, size in sizes.items() if size > MAX_FUNCTION_LINES} == {}
