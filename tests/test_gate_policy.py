"""The gate's policy: the file that ships, and errors that name the file and the nearest key."""

from pathlib import Path

import pytest

from specdist.errors import ConfigError
from specdist.gate import GatePolicy, load_policy

POLICY = Path(__file__).parents[1] / "recipes" / "configs" / "gate.yaml"


def test_the_policy_file_states_the_defaults() -> None:
    assert load_policy(POLICY) == GatePolicy()


def test_an_unknown_key_suggests_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text("min_promts: 3\n")
    with pytest.raises(ConfigError, match=r"gate\.yaml: unknown key 'min_promts'; did you mean 'min_prompts'"):
        load_policy(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "- 1\n",
        "a: [\n",
        "min_prompts: 1\n",
        "min_prompts: true\n",
        "min_prompts: 10.5\n",
        "min_mean_accepted_length: .nan\n",
        "min_mean_accepted_length: 0.9\n",
        "min_gain_over_untrained: -0.1\n",
        "min_gain_over_untrained: null\n",
        "domain_margin: 1.5\n",
        "confidence: 95\n",
        "min_speedup: fast\n",
        "min_speedup: .inf\n",
        "required_certifications: greedy\n",
        "required_rules: acceptance_rate\n",
        "required_rules: [acceptance]\n",
        "speed_batch_sizes: []\n",
        "speed_batch_sizes: [0]\n",
        "speed_batch_sizes: [one]\n",
        "max_size_ratio: null\n",
    ],
)
def test_a_bad_policy_is_a_config_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"gate\.yaml"):
        load_policy(path)


def test_a_missing_policy_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_policy(tmp_path / "nowhere.yaml")
