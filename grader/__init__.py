"""Tilegrade's service: judging, storage, pages and commands. It needs neither torch nor a GPU."""

__version__ = "0.1.0"
