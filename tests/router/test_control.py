import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from router.config.addresses import TcpAddress, UnixAddress
from router.control import Control, ControlFailed, admin_address, state_dir
from router.settings import AdminSettings, ServerSettings, Settings


def test_d4_the_state_folder_is_the_configured_one() -> None:
    settings = Settings(server=ServerSettings(state_dir="/srv/state"))

    assert state_dir(settings, {"XDG_RUNTIME_DIR": "/srv"}) == Path("/srv/state")


def test_d4_the_state_folder_is_in_the_user_s_runtime_folder(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}

    assert state_dir(Settings(), environ) == tmp_path / "fencepost"


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": "/no/such/folder"}])
def test_d4_without_a_runtime_folder_root_has_run(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)

    assert state_dir(Settings(), environ) == Path("/run/fencepost")


def test_d4_without_a_runtime_folder_others_have_one_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)

    assert state_dir(Settings(), {}) == Path(tempfile.gettempdir(), "fencepost-1234")


def test_d4_the_admin_address_is_a_socket_in_the_state_folder() -> None:
    settings = Settings(server=ServerSettings(state_dir="/srv/state"))

    assert admin_address(settings, {}) == UnixAddress("/srv/state/admin.sock")


def test_d4_the_admin_address_may_be_any_other() -> None:
    settings = attrs.evolve(Settings(), admin=AdminSettings(listen="127.0.0.1:9"))

    assert admin_address(settings, {}) == TcpAddress("127.0.0.1", 9)


def test_d4_a_state_folder_too_long_for_a_socket_is_told() -> None:
    settings = Settings(server=ServerSettings(state_dir="/" + "x" * 200))

    with pytest.raises(ValueError, match="at most 107 bytes"):
        admin_address(settings, {})


def test_d1_no_router_there_is_told_with_what_to_do(tmp_path: Path) -> None:
    with Control(UnixAddress(str(tmp_path / "admin.sock"))) as control:
        for ask in (
            control.status,
            lambda: control.drain("w0"),
            lambda: control.undrain("w0"),
            lambda: control.cancel("r"),
        ):
            with pytest.raises(ControlFailed, match="no router answers at unix:"):
                ask()


def test_d1_no_router_at_a_port_is_told(closed_port: int) -> None:
    with (
        Control(TcpAddress("127.0.0.1", closed_port)) as control,
        pytest.raises(ControlFailed, match=r"no router answers at 127\.0\.0\.1:"),
    ):
        control.status()


@pytest.mark.parametrize(
    ("octets", "said"),
    [
        (b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\n{}", "answered 503"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "is no router"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "is no router"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n<>", "is no router"),
    ],
)
def test_d1_an_answer_that_is_no_status_is_told(octets: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as caller:
                caller.recv(4096)
                caller.sendall(octets)

        server = threading.Thread(target=answer)
        server.start()
        with (
            Control(TcpAddress("127.0.0.1", listener.getsockname()[1])) as control,
            pytest.raises(ControlFailed, match=said),
        ):
            control.status()
        server.join()


@pytest.fixture
def closed_port() -> Iterator[int]:
    # Bound and not listening: refused, and nobody else gets it meanwhile.
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]
