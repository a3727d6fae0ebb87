"""Fixtures of the tests of environments: the characters of a calculator, and prompts as tokens."""

import pytest
from transformers import PreTrainedTokenizerFast

from millrace.bootstrap.tiny_model import character_tokenizer
from millrace.generation.environments.calculator import Calculator


@pytest.fixture(scope="session")
def calculating() -> PreTrainedTokenizerFast:
    """A token a character, of sums and of calls of a calculator."""
    return character_tokenizer([Calculator.alphabet, "="])
