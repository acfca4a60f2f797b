"""Owns what may be done about rows of prompts that are not as they should be: the choices and their checks."""

from dataclasses import dataclass

from specdist.errors import ConfigError

_CHOICES = {
    "role_order": ("repair", "reject"),
    "given_answers": ("regenerate", "keep"),
    "lone_surrogates": ("reject", "replace"),
    "shared_prompts": ("reject", "drop"),
}


@dataclass(frozen=True)
class PromptPolicy:
    """What is done about rows that are not as they should be; the manifest counts what each policy did.

    `role_order` "repair": assistant turns before the first and after the last user turn are dropped, an empty system
    turn too; user turns in a row are answered one by one. "reject": such rows are bad.
    `given_answers` "regenerate": the target answers every user turn itself; "keep": answers in the row are history.
    `lone_surrogates` "replace": each becomes U+FFFD. `shared_prompts` "drop": training goes without the prompts that
    are evaluated on; "reject": they are an error. A source with a larger share of bad rows than `max_bad_share` is one.
    """

    role_order: str = "repair"
    given_answers: str = "regenerate"
    lone_surrogates: str = "reject"
    shared_prompts: str = "reject"
    max_bad_share: float = 0.01

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name} = {value!r}: expected {' or '.join(choices)}")
        if not 0.0 <= self.max_bad_share <= 1.0:
            raise ConfigError(f"max_bad_share = {self.max_bad_share}: expected 0 to 1")
