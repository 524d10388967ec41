import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.config.addresses import TcpAddress, UnixAddress
from router.daemon import StartFailed
from router.daemon.listening import (
    close_all,
    make_private,
    open_listeners,
    private_dir,
    shown,
    unlinked_after,
)


@pytest.fixture
def taken() -> Iterator[TcpAddress]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        yield TcpAddress("127.0.0.1", sock.getsockname()[1])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s.sock"


async def test_a_port_of_the_system_s_choice_is_shown_as_it_is() -> None:
    (sock,) = await open_listeners(TcpAddress("127.0.0.1", 0), "listen")

    with sock:
        assert shown(sock) == f"127.0.0.1:{sock.getsockname()[1]}"
        assert not sock.getblocking()


async def test_d5_a_taken_port_is_told(taken: TcpAddress) -> None:
    with pytest.raises(StartFailed, match="is taken: stop what listens there"):
        await open_listeners(taken, "listen")


async def test_d5_an_unknown_host_is_told() -> None:
    with pytest.raises(StartFailed, match="is not known: correct listen"):
        await open_listeners(TcpAddress("no.such.host.invalid", 0), "listen")


async def test_d5_an_address_elsewhere_is_told() -> None:
    with pytest.raises(StartFailed, match="not an address of this machine"):
        await open_listeners(TcpAddress("192.0.2.1", 0), "listen")


async def test_a_unix_socket_is_made_and_shown(path: Path) -> None:
    (sock,) = await open_listeners(UnixAddress(str(path)), "listen")

    with sock:
        assert shown(sock) == f"unix:{path}"
        make_private([sock])
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_d5_a_socket_that_nobody_answers_is_taken_over(path: Path) -> None:
    (stale,) = await open_listeners(UnixAddress(str(path)), "listen")
    stale.close()

    (sock,) = await open_listeners(UnixAddress(str(path)), "listen")

    with sock, socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(path))


async def test_d5_a_socket_that_somebody_answers_is_left_alone(path: Path) -> None:
    (first,) = await open_listeners(UnixAddress(str(path)), "listen")

    with first:
        with pytest.raises(StartFailed, match="a running router answers at"):
            await open_listeners(UnixAddress(str(path)), "listen")
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))


async def test_d5_a_file_in_the_place_of_a_socket_is_left_alone(path: Path) -> None:
    path.write_text("mine")

    with pytest.raises(StartFailed, match="is there and is no socket"):
        await open_listeners(UnixAddress(str(path)), "listen")
    assert path.read_text() == "mine"


async def test_d5_a_socket_in_no_folder_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="create its folder, or correct listen"):
        await open_listeners(UnixAddress(str(tmp_path / "no/s.sock")), "listen")


async def test_our_sockets_are_removed_at_the_end(path: Path) -> None:
    opened = await open_listeners(UnixAddress(str(path)), "listen")

    with unlinked_after(opened):
        close_all(opened)
        assert path.exists()

    assert not path.exists()


async def test_a_socket_that_another_daemon_took_over_is_left_to_it(path: Path) -> None:
    opened = await open_listeners(UnixAddress(str(path)), "listen")

    with unlinked_after(opened):
        close_all(opened)
        path.rename(path.with_suffix(".old"))
        (other,) = await open_listeners(UnixAddress(str(path)), "listen")

    with other:
        assert path.exists()


def test_d4_the_state_folder_is_made_for_us_alone(tmp_path: Path) -> None:
    private_dir(tmp_path / "a/b", "state_dir")

    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700


def test_d4_a_state_folder_that_others_write_is_refused_and_not_changed(
    tmp_path: Path,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)

    with pytest.raises(StartFailed, match="is not a folder that only this user writes"):
        private_dir(shared, "state_dir")
    assert stat.S_IMODE(shared.stat().st_mode) == 0o777


def test_d4_a_state_folder_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)

    with pytest.raises(StartFailed, match="is not a folder"):
        private_dir(tmp_path / "link", "state_dir")


def test_d5_a_state_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StartFailed, match=r"cannot make the folder .* set state_dir"):
        private_dir(tmp_path / "file/state", "state_dir")


def test_d4_a_state_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tmp_path.stat()
    if found.st_uid == 0:
        # Root's own folder is fit for anybody who may write it.
        os.chown(tmp_path, 1234, -1)
        found = tmp_path.stat()
    monkeypatch.setattr(os, "geteuid", lambda: found.st_uid + 1)

    with pytest.raises(StartFailed):
        private_dir(tmp_path, "state_dir")
