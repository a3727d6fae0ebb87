"""Prefect's own command, as `make server` runs it.

One server for many campaigns, unlike the private one of server.py.
"""

from prefect.cli import app

from flows.deployment.database import close_failed_cursors

if __name__ == "__main__":
    close_failed_cursors()
    app()
