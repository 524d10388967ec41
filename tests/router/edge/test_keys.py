import hashlib
from pathlib import Path

import pytest

from router.edge.keys import Keys, KeysInvalid
from router.http1 import Head


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def head(*headers: tuple[bytes, bytes]) -> Head:
    return Head("GET", "/", b"", headers, 1, True, False, None, False)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    path = tmp_path / "keys"
    path.write_text(
        f"# who may come in\n\n{digest('one')}  -\n"
        f"  {digest('two').upper()} Ann # of accounting\n"
    )
    return Keys.load(str(path))


@pytest.mark.parametrize(
    "sent",
    [
        (b"authorization", b"Bearer one"),
        (b"authorization", b"bearer two"),
        (b"authorization", b"Bearer  one "),
        (b"x-api-key", b"two"),
    ],
)
def test_h8_a_key_whose_digest_is_in_the_file_is_admitted(
    keys: Keys, sent: tuple[bytes, bytes]
) -> None:
    assert keys.admit(head(sent))


@pytest.mark.parametrize(
    "sent",
    [
        (b"authorization", b"Bearer three"),
        (b"authorization", b"Bearer "),
        (b"authorization", b"Basic one"),
        (b"authorization", b"one"),
        (b"x-api-key", b""),
        (b"x-api-key", digest("one").encode()),
        (b"cookie", b"one"),
    ],
)
def test_h8_everything_else_is_not(keys: Keys, sent: tuple[bytes, bytes]) -> None:
    assert not keys.admit(head(sent))
    assert not keys.admit(head())


@pytest.mark.parametrize(
    "line",
    [
        "sk-in-the-clear",
        digest("one")[:-1],
        digest("one") + "0",
        "\u00e9" * 32,
        "z" * 64,
    ],
)
def test_h8_a_malformed_line_is_named_by_number_and_never_shown(
    tmp_path: Path, line: str
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{digest('one')}\n{line}\n")

    with pytest.raises(KeysInvalid) as caught:
        Keys.load(str(path))

    assert str(caught.value) == f"{path}:2: not a SHA-256 in hex"


def test_a_file_without_keys_would_lock_everybody_out(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# none yet\n")

    with pytest.raises(KeysInvalid, match="no keys in it"):
        Keys.load(str(path))


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(KeysInvalid, match="No such file"):
        Keys.load(str(tmp_path / "none"))
