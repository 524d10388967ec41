"""What a model may be called."""

from router.catalog import Catalog
from router.settings import ModelSettings

KNOWN = {"m": 1, "n": 1}


def test_o6_a_known_name_means_itself() -> None:
    assert Catalog({}).target("m", KNOWN) == "m"


def test_o6_an_unknown_name_means_nothing() -> None:
    assert Catalog({}).target("../../slots?x=", KNOWN) is None


def test_o6_an_alias_means_its_model() -> None:
    catalog = Catalog({"m": ModelSettings(aliases=("gpt-4o",))})

    assert catalog.target("gpt-4o", KNOWN) == "m"
    assert catalog.aliases() == {"gpt-4o": "m"}


def test_o6_a_star_catches_any_other_name_and_is_not_listed() -> None:
    catalog = Catalog({"m": ModelSettings(aliases=("*",))})

    assert catalog.target("whatever", KNOWN) == "m"
    assert catalog.target("n", KNOWN) == "n"
    assert catalog.aliases() == {}


def test_a_model_may_name_its_stand_in() -> None:
    catalog = Catalog({"m": ModelSettings(fallback="n")})

    assert catalog.fallback("m") == "n"
    assert catalog.fallback("n") is None
