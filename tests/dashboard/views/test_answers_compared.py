"""The questions of two evaluations, by what became of them."""

from support.evaluation.evaluated import table_of

from dashboard.views.evaluation import CHANGES, compare_answers, count_changes

_WRONG = ("x", 0.0)
BEFORE = table_of({"a": [("A", 1.0)], "b": [_WRONG], "c": [("C", 1.0)], "d": [("x", None)], "only before": [_WRONG]})
AFTER = table_of({"a": [("A", 1.0)], "b": [("B", 1.0)], "c": [("y", 0.5)], "d": [_WRONG], "only after": [_WRONG]})


def test_questions_that_became_wrong_come_first_and_those_still_right_last() -> None:
    questions = compare_answers(BEFORE, AFTER)
    assert [(question.prompt, question.change) for question in questions] == [
        ("c", "right → wrong"),
        ("b", "wrong → right"),
        ("d", "still wrong"),
        ("a", "still right"),
    ]
    assert [question.change for question in questions] == list(CHANGES)


def test_a_question_has_the_greedy_answers_of_both_versions() -> None:
    first, *_ = compare_answers(BEFORE, AFTER)
    assert (first.expected, first.responses, first.right_samples) == ("C", ("C", "y"), ("", ""))


def test_only_a_right_greedy_answer_makes_a_question_right() -> None:
    before = table_of({"a": [("x", 0.0), ("A", 1.0), ("A", 1.0)]})
    after = table_of({"a": [("x", 0.0), ("A", 1.0), ("x", None)]})
    [question] = compare_answers(before, after)
    assert (question.change, question.right_samples) == ("still wrong", ("2 of 2", "1 of 2"))


def test_changes_are_counted_by_set() -> None:
    assert count_changes(compare_answers(BEFORE, AFTER)) == {"held_out": dict.fromkeys(CHANGES, 1)}
    hard = table_of({"a": [("A", 1.0)]}, "hard")
    assert compare_answers(BEFORE, hard) == []
