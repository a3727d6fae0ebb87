"""Rows of the stream `consumed` as the dashboard's readers hand them on, made by hand."""

import numpy as np
import numpy.typing as npt

from dashboard.read.model import Columns
from storage.schema import CONSUMED


def consumed_rows(policy_version: npt.ArrayLike, **columns: npt.ArrayLike) -> Columns:
    """A row for each of `policy_version`; other columns as given, one value for all or one each, 0 where not.

    `outcome` is a code; a reward of None is NaN, as a null of the stream is.
    """
    versions = np.asarray(policy_version, np.int64)
    given = {**columns, "policy_version": versions}
    return {
        field.name: np.array(np.broadcast_to(np.asarray(given.get(field.name, 0), _dtype(field.name)), versions.shape))
        for field in CONSUMED
    }


def _dtype(name: str) -> npt.DTypeLike:
    dtype: npt.DTypeLike = np.int8 if name == "outcome" else CONSUMED.field(name).type.to_pandas_dtype()
    return dtype
