"""A module that can't be imported."""

raise KeyError("no\nsuch thing")
