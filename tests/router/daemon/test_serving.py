import io
import json
import resource
from contextlib import ExitStack
from pathlib import Path

import pytest

import router.daemon.serving
from router.config import of_urls, parse
from router.daemon import Crashed, StartFailed, run_daemon
from router.daemon.serving import open_admin, raise_descriptor_limit
from router.errors import LocalError
from router.logs import LogForm

URLS = ("http://127.0.0.1:9",)


async def breaks(*_: object) -> None:
    secret = LocalError("an index went back")
    raise secret from ValueError("a prompt")


def test_l1_a_broken_invariant_ends_the_daemon_with_its_trace_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router.daemon.serving, "stop_on_signal", breaks)
    settings = of_urls(
        URLS, listen=["127.0.0.1:0"], admin=f"unix:{tmp_path}/admin.sock"
    )
    stream = io.StringIO()

    with pytest.raises(Crashed, match="a bug ended this process: its log says where"):
        run_daemon(settings, environ={}, form=LogForm.JSON, stream=stream)

    last = json.loads(stream.getvalue().splitlines()[-1])
    assert last["event"] == "crashed"
    assert "LocalError: an index went back" in last["trace"]
    assert "ValueError" in last["trace"]
    assert "a prompt" not in last["trace"]
    assert not (tmp_path / "admin.sock").exists()


def test_d5_a_client_address_that_can_t_be_had_leaves_no_admin_socket(
    tmp_path: Path,
) -> None:
    settings = of_urls(
        URLS, listen=["192.0.2.1:0"], admin=f"unix:{tmp_path}/admin.sock"
    )

    with pytest.raises(StartFailed):
        run_daemon(settings, environ={}, form=LogForm.JSON, stream=io.StringIO())

    assert list(tmp_path.iterdir()) == []


def test_d5_a_state_folder_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    (tmp_path / ("x" * 100)).mkdir()
    environ["XDG_RUNTIME_DIR"] = str(tmp_path / ("x" * 100))

    with pytest.raises(StartFailed, match=r"server\.state_dir is no place"):
        run_daemon(
            of_urls(URLS), environ=environ, form=LogForm.JSON, stream=io.StringIO()
        )


def test_h6_the_soft_descriptor_limit_is_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] // 2, before[1]))
    try:
        assert raise_descriptor_limit() == before[1]
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_h6_a_system_that_refuses_more_descriptors_is_lived_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(resource, "setrlimit", refuse)

    assert raise_descriptor_limit() == 256


async def test_d4_no_admin_socket_is_put_where_others_write(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state").chmod(0o777)
    settings = parse(
        '[server]\nstate_dir = "state"\n[[worker]]\nname = "a"\nurl = "http://h"',
        environ={},
        directory=tmp_path,
    )

    with (
        ExitStack() as sockets,
        pytest.raises(StartFailed, match="is not a folder that only this user writes"),
    ):
        await open_admin(settings, {}, sockets)

    assert list((tmp_path / "state").iterdir()) == []
