"""The kind of enumeration that our tables are keyed by."""

from enum import Enum


class Word(Enum):
    """An enumeration whose members hash by identity.

    Members are compared by identity anyway. ``Enum`` hashes a member's name in
    Python code, which is a good part of looking up a transition.
    """

    __hash__ = object.__hash__
