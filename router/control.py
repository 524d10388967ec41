"""Where a running router is met on its own machine, and how it is spoken to.

The daemon listens at ``admin_address``; the commands of the command line
find it there. Plain blocking calls: this runs outside of any Trio run.
"""

import os
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

import httpx

from router.config.addresses import Address, UnixAddress, parse_address
from router.errors import RouterError
from router.settings import Settings

SOCKET_NAME: Final = "admin.sock"
#: The same of an agent, which may run beside a router.
AGENT_SOCKET_NAME: Final = "agent.sock"
#: A router answers these from memory; longer means that it hangs.
ANSWER_S: Final = 5.0


class ControlFailed(RouterError):
    """The router could not be asked, or said no; the text says which and why."""


def state_dir(settings: Settings, environ: Mapping[str, str]) -> Path:
    """Give the folder of the admin socket; it need not exist yet.

    What is configured, else the user's runtime folder, else ``/run`` for root
    and a folder with the user's number under the temp folder for others.
    """
    if settings.server.state_dir is not None:
        return Path(settings.server.state_dir)
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "fencepost"
    if os.geteuid() == 0:
        return Path("/run/fencepost")
    return Path(tempfile.gettempdir()) / f"fencepost-{os.geteuid()}"


def admin_address(settings: Settings, environ: Mapping[str, str]) -> Address:
    """Give the address of the admin listener: as configured, else the socket.

    Raises:
        ValueError: the state folder's path is too long for a socket.
    """
    if settings.admin.listen is not None:
        return parse_address(settings.admin.listen)
    name = SOCKET_NAME if settings.agent is None else AGENT_SOCKET_NAME
    return parse_address(f"unix:{state_dir(settings, environ) / name}")


class Control:
    """One running router, asked over its admin listener."""

    def __init__(self, address: Address) -> None:
        """Nothing is connected yet; leaving the ``with`` block closes."""
        self.address = address
        unix = isinstance(address, UnixAddress)
        self._client = httpx.Client(
            transport=httpx.HTTPTransport(
                uds=address.path if isinstance(address, UnixAddress) else None
            ),
            base_url="http://fencepost" if unix else f"http://{address}",
            timeout=ANSWER_S,
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def status(self) -> dict[str, Any]:
        """Give ``/status``: JSON values.

        Raises:
            ControlFailed: no router answers there, or it can't now.
        """
        answer = self._ask("GET", "/status")
        self._check(answer)
        try:
            status = answer.json()
        except ValueError:
            status = None
        if not isinstance(status, dict) or "workers" not in status:
            raise ControlFailed(f"what answers at {self.address} is no router")
        return status

    def drain(self, worker: str, within_s: float | None = None) -> None:
        """Give *worker* no new requests.

        Args:
            worker: its name.
            within_s: seconds after which what still runs is cut; None: never.

        Raises:
            ControlFailed: no router answers there, or it has no such worker.
        """
        query = "" if within_s is None else f"?within_s={within_s:g}"
        self._order("drain", worker, f"no worker {worker}", query)

    def undrain(self, worker: str) -> None:
        """Give *worker* requests again. Raises as ``drain``."""
        self._order("undrain", worker, f"no worker {worker}")

    def cancel(self, request: str) -> None:
        """End a live request. Raises as ``drain``."""
        self._order("cancel", request, f"no live request {request}")

    def _order(self, verb: str, what: str, unknown: str, query: str = "") -> None:
        answer = self._ask("POST", f"/{verb}/{quote(what, safe='')}{query}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            raise ControlFailed(unknown)
        self._check(answer)

    def _check(self, answer: httpx.Response) -> None:
        if not answer.is_success:
            raise ControlFailed(f"the router answered {answer.status_code}")

    def _ask(self, method: str, path: str) -> httpx.Response:
        try:
            self._knock()
            return self._client.request(method, path)
        except (OSError, httpx.ConnectError):
            raise ControlFailed(
                f"no router answers at {self.address}: "
                "start one, or name its --admin address or --config file"
            ) from None
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise ControlFailed(f"the router at {self.address}: {what}") from None

    def _knock(self) -> None:
        # httpx leaves its unix socket open when a connect fails.
        if isinstance(self.address, UnixAddress):
            with socket.socket(socket.AF_UNIX) as caller:
                caller.settimeout(ANSWER_S)
                caller.connect(self.address.path)
