"""What a part's record says of its rows, against the rows themselves."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from storage.streams.record import Record


def disagreements(record: Record, rows: pa.Table) -> Iterator[str]:
    """One clause for each value of the record that the rows give otherwise; only of columns that there are."""
    for name, found in _found(rows).items():
        if (said := getattr(record, name)) != found:
            yield f"{name} of the rows is {found}, but the record says {said}"


def _found(rows: pa.Table) -> dict[str, object]:
    found: dict[str, object] = {}
    if "row_id" in rows.column_names:
        found["first_row_id"] = rows["row_id"][0].as_py()
    if "response_tokens" in rows.column_names:
        found["tokens"] = pc.sum(pc.list_value_length(rows["response_tokens"])).as_py()
        found["min_policy_version"] = pc.min(rows["min_policy_version"]).as_py()
        # Records of unfinished responses, whose rows have no row_id, name no groups.
        if "row_id" in rows.column_names:
            found["group_ids"] = rows["group_id"].unique().to_pylist()
    return found
