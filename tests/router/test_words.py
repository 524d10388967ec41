"""The kind of enumeration that tables are keyed by."""

from router.words import Word


class Colour(Word):
    RED = "red"
    BLUE = "blue"


def test_members_are_keys_of_their_own() -> None:
    table = {Colour.RED: 1, Colour.BLUE: 2}

    assert (table[Colour("red")], table[Colour.BLUE]) == (1, 2)


def test_members_hash_by_identity_not_in_python_code() -> None:
    assert hash(Colour.RED) == object.__hash__(Colour.RED)
