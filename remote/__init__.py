"""Folders at URLs, through fsspec: listed, read, and written by way of a copy on this machine.

This module tells paths and URLs apart.
"""

from __future__ import annotations

import os

__all__ = ["absolute_place", "is_url", "leads_out", "local_dir", "names_in", "real_place", "why_unwritable"]

_LOCAL_SCHEMES = ("file://", "local://")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether a path names a remote folder: a URL that is not `file://` or `local://`."""
    text = os.fspath(path)
    return ("://" in text or "::" in text) and not text.startswith(_LOCAL_SCHEMES)


def local_dir(path: str) -> str:
    """Return the path, or the working directory if it is a URL: for files that stay on this machine."""
    return os.getcwd() if is_url(path) else path


def names_in(folder: str) -> set[str]:
    """Return the names in a folder, on this machine or at a URL; none if it is not there.

    Raises:
        ConfigError: The store at the URL cannot be read.
    """
    if is_url(folder):
        from .store import RemoteStore, explained  # imports fsspec, for URLs alone

        with explained(folder):
            return RemoteStore(folder).names()
    try:
        return set(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return set()


def real_place(path: str) -> str:
    """Return a path absolute and without links; a URL without a slash at its end."""
    return path.rstrip("/") if is_url(path) else os.path.realpath(path)


def absolute_place(path: str) -> str:
    """Return a path absolute; a URL as it is."""
    return path if is_url(path) else os.path.abspath(path)


def leads_out(name: object) -> bool:
    """Return whether the name of a file or folder, joined to a folder's path, may be a place outside of it."""
    text = str(name).replace("\\", "/")
    return ".." in text.split("/") or is_url(text) or os.path.isabs(text)


def why_unwritable(folder: str) -> str:
    """Return why a folder on this machine, there or not yet, cannot be written to; "" if it can, or is at a URL."""
    if is_url(folder):
        return ""
    parent = os.path.abspath(folder)  # the parent of a relative one may be ""
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    if not os.path.isdir(parent):
        return f"{parent} is a file, not a folder"
    return "" if os.access(parent, os.W_OK | os.X_OK) else f"no permission to write to {parent}"
