"""The fixtures of whole campaigns."""

from support.campaigns.fixtures import environment, millrace, millrace_alone, module_millrace, prefect_api

__all__ = ["environment", "millrace", "millrace_alone", "module_millrace", "prefect_api"]
