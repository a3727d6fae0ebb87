"""Where a data set's answer stands: after GSM8K's hashes, in MATH's last box."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.prompts.answers import EXPECTED, boxed, reference_answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("2 + 2 = 4\n#### 4", "4"),
        ("#### 1,234,567", "1234567"),
        ("#### -1,200.50 ", "-1200.50"),
        ("#### 3 or #### 5", "5"),
        ("#### 1,2", "1,2"),
        ("#### (3, 4)", "(3, 4)"),
        ("####", None),
        ("#### \n", None),
        ("the answer is 4", None),
        ("## 4", None),
    ],
)
def test_gsm8ks_answer_stands_after_its_last_hashes_without_commas_between_thousands(
    text: str, answer: str | None
) -> None:
    assert reference_answer(text, "gsm8k") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $\boxed{2}$.", "2"),
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"\boxed{1}, no: \boxed{2}", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{ 3 }", "3"),
        (r"\boxed{a \boxed{b} c}", "b"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"}} \boxed{1}", "1"),
        (r"the answer is $\boxed 5$.", "5"),
        (r"the answer is \boxed 5.", "5"),
        (r"\boxed{}", None),
        (r"\boxed{1", None),
        (r"\boxed", None),
        ("2", None),
        (r"\boxedx{2}", None),
    ],
)
def test_maths_answer_stands_in_the_last_box_whose_braces_balance(text: str, answer: str | None) -> None:
    assert boxed(text) == reference_answer(text, "boxed") == answer


@given(inner=st.recursive(st.text("ab \\$", max_size=4), lambda below: below.map(lambda text: f"{{{text}}}")))
def test_whatever_balances_within_a_box_is_taken_whole(inner: str) -> None:
    # A backslash before a brace would make it a sign of the formula.
    inner = inner.replace("\\", "")
    assert boxed(f"\\boxed{{{inner}}} and more") == (inner.strip() or None)


def test_megabytes_of_boxes_that_never_close_take_no_longer_than_reading_them() -> None:
    assert boxed("\\boxed{" * 300_000) is None
    assert boxed("\\boxed{4}" + "{" * 1_000_000) == "4"


def test_a_bare_answer_is_the_whole_text_and_no_blank_one() -> None:
    assert reference_answer(" 42 ", "text") == " 42 "
    assert reference_answer(" \n", "text") is None


def test_each_format_says_what_it_expects() -> None:
    assert set(EXPECTED) == {"text", "gsm8k", "boxed"}
    for answer_format in EXPECTED:
        assert reference_answer("", answer_format) is None
