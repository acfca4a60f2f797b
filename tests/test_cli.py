"""The command line over a registry with two models: what is printed where, exit codes, what is imported."""

import io
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from registry_factory import empty_database, make_export

from specdist import cli
from specdist.registry.store import Registry


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with two versions of "alpha" and one of "beta". Read only: `root` is a copy."""
    directory = tmp_path_factory.mktemp("published")
    (directory / "registry").mkdir()
    (directory / "registry" / "mlflow.db").write_bytes(empty_database())
    for model, length, expected in (("alpha", "2.31", None), ("alpha", "2.48", "1"), ("beta", "1.90", None)):
        export = make_export(directory / f"export-{length}", length)
        registry = Registry(directory / "registry", model)
        registry.publish(export, files={}, tags={"mean_accepted_length": length}, expected_champion=expected)
    return directory / "registry"


@pytest.fixture
def root(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "registry", symlinks=True))


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.main(["registry", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_list_shows_every_version_and_marks_champions(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "list", "--root", root)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()[1:]]
    assert [row[:-1] for row in rows] == [
        ["alpha", "1", "2.31"],
        ["alpha", "2", "*", "champion", "2.48"],
        ["beta", "1", "*", "champion", "1.90"],
    ]
    assert all(row[-1].startswith("20") for row in rows)


def test_list_shows_what_is_left_when_a_champion_is_missing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "alpha" / "versions" / "2")
    code, out, err = run(capsys, "list", "--root", root)
    assert code == 2
    assert "(missing)" in out
    assert "beta" in out
    assert "champion of alpha points to missing version" in err


def test_show(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "alpha", "--root", root)
    fields = dict(line.split("  ", 1) for line in out.splitlines())
    fields = {key.strip(): value.strip() for key, value in fields.items()}
    assert code == 0
    assert fields["version"] == "2"
    assert fields["mean_accepted_length"] == "2.48"
    assert fields["path"] == str(root / "alpha" / "versions" / "2")
    assert fields["files"] == "as published"
    assert "version               1" in run(capsys, "show", "alpha", "1", "--root", root)[1]


def test_show_reports_a_tampered_version(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "alpha" / "versions" / "1" / "config.json"
    path.unlink()
    path.write_text("other")
    code, out, err = run(capsys, "show", "alpha", "1", "--root", root)
    assert code == 2
    assert "2.31" in out
    assert "config.json" in err


def test_path_prints_the_link_and_nothing_else(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root.parent)
    assert run(capsys, "path", "alpha", "--root", "registry") == (0, f"{root}/alpha/aliases/champion\n", "")


def test_rollback(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "rollback", "alpha", "--root", root)
    assert code == 0
    assert "now version 1" in out
    assert os.readlink(root / "alpha" / "aliases" / "champion") == "../versions/1"
    assert run(capsys, "rollback", "alpha", "--to", "2", "--root", root)[0] == 0
    assert os.readlink(root / "alpha" / "aliases" / "champion") == "../versions/2"


def test_prune_and_reconcile_say_what_was_done(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "prune", "alpha", "--root", root) == (0, "alpha: deleted nothing\n", "")
    (root / "alpha" / "aliases" / "champion").unlink()
    assert run(capsys, "reconcile", "alpha", "--root", root) == (0, "alpha: in order, champion 2\n", "")
    assert os.readlink(root / "alpha" / "aliases" / "champion") == "../versions/2"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["list", "--root", "nowhere"], "nowhere: no registry here"),
        (["show", "gamma"], r"no model 'gamma'; there are \['alpha', 'beta'\]"),
        (["show", "alpha", "7"], "no version 7"),
        (["path", "gamma"], "gamma has no champion"),
        (["rollback", "beta"], "no earlier champion"),
        (["rollback", "gamma"], "no model 'gamma'"),
        (["rollback", "alpha", "--to", "7"], "no version 7"),
        (["path", "my-eagle-draft"], "vLLM misreads"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.chdir(root.parent)
    code, out, err = run(capsys, *argv, *([] if "--root" in argv else ["--root", root]))
    assert (code, out) == (2, "")
    assert re.match(f"error: .*{message}", err)
    assert len(err.splitlines()) == 1
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["decode", "--target", "t", "--stop", "", "hi"], "--stop: '': expected one character or more"),
        (["decode", "--target", "t", "a\udcff"], "not UTF-8"),
        (["decode", "--target", "t", "--system", "a\udcff", "hi"], "not UTF-8"),
        (["decode", "--target", "t", "--seed", str(2**63), "hi"], "--seed: '9223372036854775808': expected a whole"),
        (["data", "show", "x", "--rows", "-1"], "--rows: '-1': expected a whole number"),
        (["sync", "--seconds", "nan"], "--seconds: 'nan': expected a number of seconds"),
        (["sync", "--seconds", "-1"], "--seconds: '-1': expected a number of seconds"),
        (["advise", "--target", "t", "--json", "."], "--json: '.': is a directory"),
        (["report", "x", "--html", "."], "--html: '.': is a directory"),
        (["compare", "x", "y", "--html", "."], "--html: '.': is a directory"),
    ],
)
def test_a_word_that_cannot_be_meant_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        cli.main(argv)
    assert exit_code.value.code == 2
    assert message in capsys.readouterr().err


def test_a_prompt_on_standard_input_that_is_no_text_is_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert cli.main(["decode", "--target", "t"]) == 2
    assert "error: the prompt on standard input: not UTF-8" in capsys.readouterr().err


def test_what_cannot_be_written_or_found_is_an_error_in_a_line(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    export = root / "beta" / "versions" / "1"
    for argv, message in [
        (["export", "--format", "vllm", str(export), str(tmp_path / "file" / "out")], "File exists"),
        (["sync", "--root", str(tmp_path / "typo")], "typo: no registry here"),
    ]:
        assert cli.main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert message in error
        assert len(error.splitlines()) == 1


def test_a_reader_that_goes_away_is_no_traceback(root: Path) -> None:
    script = "import sys; from specdist.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-c", script, "registry", "path", "alpha", "--root", str(root)]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (141, "")


def test_the_default_root_is_that_of_the_recipes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._parser().parse_args(["registry", "list"]).root == Path("runs/registry")


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    script = "import sys, specdist.cli; print(sorted({'torch', 'mlflow', 'numpy', 'sqlalchemy'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert result.stdout == "[]\n"
