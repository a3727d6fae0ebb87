"""Keys and algorithms by the names that other libraries have for them."""

import pytest

from configs.errors import ConfigError
from configs.load import PRESETS, load_config
from configs.other_names import ALGORITHMS, OTHER_NAMES
from configs.schema import known_fields

TINY = PRESETS / "tiny-cpu.yaml"


def refusal(setting: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(TINY, [setting])
    return caught.value


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lr", "training.learning_rate"),
        ("training.lr", "training.learning_rate"),
        ("learning_rate", "training.learning_rate"),
        ("temperature", "generation.temperature"),
        ("beta", "training.kl.coefficient"),
        ("algorithm.kl_ctrl.kl_coef", "training.kl.coefficient"),
        ("actor_rollout_ref.rollout.n", "generation.group_size"),
        ("data.train_batch_size", "training.groups_per_step"),
        ("epsilon", "training.loss.clip_low"),
        ("adamw.epsilon", "training.adamw.epsilon"),
        ("sources.words.max_completion_length", "sources.words.generation.max_new_tokens"),
        ("sources.words.lr", "training.learning_rate"),
    ],
)
def test_a_key_of_another_library_gets_the_key_here(typed: str, meant: str) -> None:
    assert refusal(f"{typed}=1").expected == meant


def test_every_other_name_means_a_key_that_exists_and_is_no_key_itself() -> None:
    keys = known_fields()
    for key, others in OTHER_NAMES.items():
        assert key in keys or key.startswith("generation.engine_args."), key
        assert not keys.keys() & set(others.split()), others
    names = " ".join(OTHER_NAMES.values()).split()
    assert len(names) == len(set(names)), "each has one meaning"


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_as_loss_names_settings_that_make_a_config(algorithm: str) -> None:
    settings = ALGORITHMS[algorithm]
    mistake = refusal(f"training.loss={algorithm.upper()}")
    assert mistake.expected is not None
    assert settings in mistake.expected
    load_config(TINY, settings.split())
