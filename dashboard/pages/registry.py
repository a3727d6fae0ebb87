"""The views of a run, for the page, the export and the tests."""

from dashboard.views import evaluation, flow, learning, ledger, record, staleness
from dashboard.views.blocks import View

VIEWS: tuple[View, ...] = (staleness.VIEW, flow.VIEW, learning.VIEW, evaluation.VIEW, ledger.VIEW, record.VIEW)
