"""YAML without surprises: scalars as in YAML 1.2; keys must be text and unique; no text is lost in a comment.

PyYAML reads YAML 1.1, where `2e-4` is text, `010` is 8, `1:30` is 90 and `no` is false. Here null, true, false and
decimal numbers, `2e-4` among them, are recognised, and every other plain scalar is text. ruamel.yaml's YAML 1.2 would
read `010` as 10 and has octal and binary numbers, so it would need the same rules.
"""

import re

import yaml

_TAG = "tag:yaml.org,2002:"
_COMMENT = re.compile(r"[ \t]*#")
_HASHES = re.compile(r"[ \t]+##")


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 — PyYAML's own class attribute, emptied to start from no rules

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[str] = set()
        for key, value in node.value:
            if key.tag != f"{_TAG}str":
                problem = "a key is not text"
            elif key.value in seen:
                problem = f'key "{key.value}" stands twice'
            elif _is_cut_off(value):
                problem = f"{key.value} is cut off by # (quote text that holds #, or write null)"
            else:
                seen.add(key.value)
                continue
            raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


def _is_cut_off(value: yaml.Node) -> bool:
    """Whether a comment stands in place of the value, or `##` ends text that has no quotes."""
    if not isinstance(value, yaml.ScalarNode) or value.style is not None:
        return False
    cut = _HASHES if value.tag == f"{_TAG}str" else None if value.value else _COMMENT
    end = value.end_mark
    return cut is not None and cut.match(end.buffer or "", end.pointer) is not None


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"^(?:~|null|)$"), None)
_Loader.add_implicit_resolver(f"{_TAG}bool", re.compile(r"^(?:true|false)$"), None)
# 18 digits: no field needs more, and Python refuses to parse numbers of thousands of digits.
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(r"^[-+]?(?:0|[1-9][0-9]{0,17})$"), None)
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(r"^[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)$"),
    None,
)


def parse_document(text: str) -> object:
    """Parse one YAML document to dicts, lists and scalars; an empty one is None.

    Raises ValueError saying line, column and problem.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context}") from error
    except RecursionError as error:
        raise ValueError("lists or sections are nested too deeply") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        column = error.position - (text.rfind("\n", 0, error.position) + 1) + 1
        raise ValueError(f"line {line}, column {column}: {error.reason}") from error


def parse_scalar(text: str) -> object:
    """Parse one scalar as a document would, but take everything else, `[`, `#` and `: ` included, as text.

    So regular expressions and URLs need no quotes on a command line. Quotes around text are removed.
    Raises ValueError when a quote is not closed.
    """
    if text[:1] in ("'", '"'):
        return parse_document(text)
    loader = _Loader("")
    tag = loader.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
    return loader.construct_object(yaml.ScalarNode(tag, text))
