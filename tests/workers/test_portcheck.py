import os
import socket
import subprocess
import sys

from tests.kit.keeping import free_port, listening, no_descriptor
from workers import portcheck


def test_l6_a_free_port_is_not_taken() -> None:
    assert portcheck.why_taken(free_port()) is None


def test_l6_a_taken_port_is_told_with_its_owner() -> None:
    with listening() as port:
        why = portcheck.why_taken(port)

    assert why is not None
    assert why.startswith(f"port {port} is taken by pid {os.getpid()} (")
    assert portcheck.why_taken(port) is None


def test_h8_an_owner_is_named_without_its_arguments() -> None:
    assert portcheck._name(("/usr/bin/llama-server", "--api-key", "k")) == (
        "llama-server"
    )
    assert portcheck._name(
        ("/usr/bin/python3", "-m", "vllm.api", "--api-key", "k")
    ) == ("python3 -m vllm.api")
    assert portcheck._name(()) == "?"


def test_l6_a_port_on_all_addresses_is_taken_too() -> None:
    with socket.create_server(("", 0)) as server:
        assert portcheck.why_taken(server.getsockname()[1]) is not None
    # A dual-stack listener answers 127.0.0.1 as well.
    with socket.create_server(
        ("::", 0), family=socket.AF_INET6, dualstack_ipv6=True
    ) as server:
        assert portcheck.why_taken(server.getsockname()[1]) is not None


def test_h6_without_a_descriptor_nothing_is_said_of_a_port() -> None:
    with listening() as port:
        with no_descriptor():
            assert portcheck.why_taken(port) is None
            assert portcheck.owner(port) == ""
            assert portcheck.listens(port, [os.getpid()]) is None
        assert portcheck.why_taken(port) is not None
        assert portcheck.listens(port, [os.getpid()]) is True


def test_l6_looking_leaves_the_port_free() -> None:
    port = free_port()
    portcheck.why_taken(port)

    with listening(port) as again:
        assert again == port


def test_l6_who_listens_is_told_by_the_kernel() -> None:
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0));"
        " print(s.getsockname()[1], flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        try:
            assert portcheck.listens(port, [2**30, child.pid]) is True
            assert portcheck.listens(port, [os.getpid()]) is False
            assert f"pid {child.pid}" in portcheck.owner(port)
        finally:
            child.kill()
    assert portcheck.listens(port, [os.getpid()]) is False
    assert portcheck.owner(port) == ""
