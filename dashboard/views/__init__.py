"""The views of a run, as the page, the export and the tests show them."""

from dashboard.blocks import View
from dashboard.views import flow, learning, ledger, staleness

VIEWS: tuple[View, ...] = (staleness.VIEW, flow.VIEW, learning.VIEW, ledger.VIEW)
