"""Text around a prompt of plain text."""


def templated(template: str | None, text: str) -> str:
    """What the policy reads: `text` where `template` has `{prompt}`; `text` alone without a template."""
    if template is None:
        return text
    before, _, after = template.partition("{prompt}")
    return before + text + after
