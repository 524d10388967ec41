"""What each key takes: one check a key, each a value in and a value out.

A check never converts a type: ``"8"`` is no number, ``true`` is no count. It
raises ValueError with a sentence that fits behind ``path: ``.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

from router.catalog import CATCH_ALL
from router.config.addresses import parse_address, parse_tcp
from router.edge.keys import Keys, KeysInvalid
from router.openai.prompting import checked_bios
from router.sieve import FOR_MODELS

Check: TypeAlias = Callable[[Any], Any]

#: Signals that a model may give by calling an exit tool.
SIGNALS: Final = tuple(code.value for code in FOR_MODELS)
ENGINES: Final = ("auto", "llama-server", "vllm", "sglang", "generic")
#: Of thinking blocks (M7).
SIGNATURES: Final = ("off", "opaque")
#: A month: more is a slip of the pen.
MS_MAX: Final = 31 * 24 * 3_600_000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_SHOWN_BITS: Final = 1_024
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)*", re.ASCII)
_KINDS: Final[Mapping[type, str]] = {
    bool: "a boolean",
    int: "a whole number",
    float: "a fraction",
    str: "a string",
    list: "a list",
    dict: "a table",
}


class EntriesInvalid(ValueError):
    """A value of which some entries are wrong: (0-based index, sentence) each.

    The index is None where the sentence itself names the entry.
    """

    def __init__(self, entries: Sequence[tuple[int | None, str]]) -> None:
        """Carry all that is wrong, at least one."""
        super().__init__("; ".join(sentence for _, sentence in entries))
        self.entries = entries


def kind_of(value: object) -> str:
    """Name the TOML kind of *value*, for people."""
    return _KINDS.get(type(value), "a date or time")


def whole(least: int, most: int = 2**40, *, unit: str = "") -> Check:
    """Take whole numbers in a range, both ends included."""

    def check(value: Any) -> int:
        if type(value) is not int:
            of_what = f" of {unit}" if unit else ""
            raise ValueError(f"needs a whole number{of_what}, got {kind_of(value)}")
        shown = f" {unit}" if unit else ""
        # Python writes no number of thousands of digits; hex may have them.
        got = value if value.bit_length() < _SHOWN_BITS else "far beyond"
        if value < least:
            raise ValueError(f"needs at least {least}{shown}, got {got}")
        if value > most:
            raise ValueError(f"takes at most {most}{shown}, got {got}")
        return value

    return check


def ms(least: int) -> Check:
    """Take milliseconds, *least* to a month."""
    return whole(least, MS_MAX, unit="ms")


def text(value: Any) -> str:
    """Take a string that says something."""
    if type(value) is not str:
        raise ValueError(f"needs a string, got {kind_of(value)}")
    if not value.strip() or not value.isprintable():
        raise ValueError("needs a printable string that is not empty")
    return value


def texts(each: Check = text, *, least: int = 0, distinct: bool = True) -> Check:
    """Take a list of strings, *distinct* ones by default; a tuple comes out."""

    def check(value: Any) -> tuple[str, ...]:
        if type(value) is not list:
            raise ValueError(f"needs a list of strings, got {kind_of(value)}")
        if len(value) < least:
            raise ValueError("needs at least one entry")
        found: list[str] = []
        wrong: list[tuple[int | None, str]] = []
        for index, entry in enumerate(value):
            try:
                checked = each(entry)
            except ValueError as error:
                wrong.append((index, str(error)))
                continue
            if distinct and checked in found:
                wrong.append((index, f"the same as [{found.index(checked)}]"))
            found.append(checked)
        if wrong:
            raise EntriesInvalid(wrong)
        return tuple(found)

    return check


def model_name(value: Any) -> str:
    """Take the name of a model, which is never ``*``: that is all names."""
    name = text(value)
    if name == CATCH_ALL:
        raise ValueError("* is no model: it is an alias that stands for all names")
    return name


def flag(value: Any) -> bool:
    """Take true or false."""
    if type(value) is not bool:
        raise ValueError(f"needs true or false, got {kind_of(value)}")
    return value


def argument(value: Any) -> str:
    """Take one argument of a command: any text that a program can be given."""
    if type(value) is not str:
        raise ValueError(f"needs a string, got {kind_of(value)}")
    if "\0" in value:
        raise ValueError("takes no zero byte")
    return value


def arguments(value: Any) -> tuple[str, ...]:
    """Take a command: a list, its program first; a tuple comes out."""
    if type(value) is str:
        raise ValueError('takes no shell: write a list, ["program", "argument"]')
    found: tuple[str, ...] = texts(argument, least=1, distinct=False)(value)
    if not found[0].strip():
        raise EntriesInvalid([(0, "needs a program")])
    return found


def variables(value: Any) -> Mapping[str, str]:
    """Take a table of environment variables; what they hold is never repeated."""
    if type(value) is not dict:
        raise ValueError(f"needs a table of strings, got {kind_of(value)}")
    wrong: list[tuple[None, str]] = []
    for name, entry in value.items():
        if not name or "=" in name or "\0" in name:
            wrong.append((None, f"{name!r} is no name of a variable"))
        elif type(entry) is not str:
            wrong.append((None, f"{name} needs a string, got {kind_of(entry)}"))
        elif "\0" in entry:
            wrong.append((None, f"{name} takes no zero byte"))
    if wrong:
        raise EntriesInvalid(wrong)
    return value


def listen(value: Any) -> str:
    """Take one listen address."""
    address = text(value)
    parse_address(address)
    return address


def listens(value: Any) -> tuple[str, ...]:
    """Take one listen address, or a list of them."""
    if type(value) is str:
        return (listen(value),)
    entries: tuple[str, ...] = texts(listen, least=1)(value)
    return entries


def host_port(value: Any) -> str:
    """Take ``host:port`` or ``[v6]:port`` of somebody to connect to."""
    address = text(value)
    if not parse_tcp(address).port:
        raise ValueError("nobody listens on port 0")
    return address


def tcp_listens(value: Any) -> tuple[str, ...]:
    """Take one TCP address to listen on, or a list of them."""

    def check(entry: Any) -> str:
        address = text(entry)
        parse_tcp(address)
        return address

    if type(value) is str:
        return (check(value),)
    entries: tuple[str, ...] = texts(check)(value)
    return entries


def prefix(value: Any) -> str:
    """Take a path prefix: "" or ``/llm``, without a slash at its end."""
    if type(value) is not str:
        raise ValueError(f"needs a string, got {kind_of(value)}")
    if not _PREFIX.fullmatch(value):
        raise ValueError(f'{value!r} is no path prefix: "" or "/llm"')
    return value


def worker_name(value: Any) -> str:
    """Take a worker's name: it goes into headers, metrics and commands."""
    name = text(value)
    if not _NAME.fullmatch(name):
        raise ValueError("needs 1 to 64 letters, digits, dots, dashes, underscores")
    return name


def http_url(value: Any) -> str:
    """Take an http(s) URL without user, query or fragment.

    What the URL holds is never repeated in a fault: it may hold a password.
    """
    url = text(value)
    try:
        parts = urlsplit(url)
        port = parts.port
        # What no resolver takes: an empty part, or one that is too long.
        (parts.hostname or "").encode("idna")
    except ValueError:
        raise ValueError("is not a URL: http://host:port") from None
    if parts.scheme not in {"http", "https"}:
        raise ValueError("needs http:// or https://")
    if "@" in parts.netloc:
        raise ValueError("takes no user or password: use api_key_env")
    if not parts.hostname or port == 0 or not url.isascii() or " " in url:
        raise ValueError("is not a URL: http://host:port")
    if "?" in url or "#" in url:
        raise ValueError("takes no query and no fragment")
    return url


def worker_url(value: Any) -> str:
    """Take the URL of an engine: its root, with or without ``/v1``.

    A path in front of ``/v1`` is an engine behind a proxy; one behind it is an
    endpoint, which nobody means.
    """
    url = http_url(value)
    base = urlsplit(url).path.rstrip("/").removesuffix("/v1")
    if not _PREFIX.fullmatch(base) or "v1" in base.split("/"):
        raise ValueError("ends at the engine's root or at /v1: http://host:port")
    return url


def engine(value: Any) -> str:
    """Take the name of a kind of engine."""
    name = text(value)
    if name not in ENGINES:
        raise ValueError(
            f"{name!r} is no engine"
            + near(name, ENGINES, otherwise=f": {', '.join(ENGINES)}")
        )
    return name


def signature(value: Any) -> str:
    """Take how thinking blocks are signed."""
    name = text(value)
    if name not in SIGNATURES:
        raise ValueError(f"{name!r} is no signature: {', '.join(SIGNATURES)}")
    return name


def one_of(known: tuple[str, ...]) -> Check:
    """Take one of the words that are *known*."""

    def check(value: Any) -> str:
        word = text(value)
        if word not in known:
            raise ValueError(f"{word!r} is not one of {', '.join(known)}")
        return word

    return check


def bios(value: Any) -> str:
    """Take a model's system text, lines and all (J4)."""
    if type(value) is not str:
        raise ValueError(f"needs a string, got {kind_of(value)}")
    return checked_bios(value)


def near(word: str, known: tuple[str, ...], *, otherwise: str = "") -> str:
    """Say which known word was meant, if one is near."""
    close = get_close_matches(word.lower(), known, n=1)
    return f", did you mean {close[0]}?" if close else otherwise


def set_variable(environ: Mapping[str, str] | None) -> Check:
    """Take the name of a variable that holds something in *environ*, if given."""

    def check(value: Any) -> str:
        name = text(value)
        if environ is not None and not environ.get(name, "").strip():
            raise ValueError(f"the environment variable {name} is not set")
        return name

    return check


def path_from(directory: Path) -> Check:
    """Take a path; one that is relative starts from *directory*."""

    def check(value: Any) -> str:
        return str(directory / text(value))

    return check


@contextmanager
def _looking() -> Iterator[None]:
    """Turn a path that the system won't look at into a sentence."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot be looked at: {error.strerror}") from None


def folder_from(directory: Path) -> Check:
    """Take the path of a folder that is there."""
    path = path_from(directory)

    def check(value: Any) -> str:
        name: str = path(value)
        with _looking():
            found = Path(name).is_dir()
        if not found:
            raise ValueError(f"there is no folder {name}")
        return name

    return check


def file_from(directory: Path) -> Check:
    """Take the path of a file that is there."""
    path = path_from(directory)

    def check(value: Any) -> str:
        name: str = path(value)
        with _looking():
            found = Path(name).is_file()
        if not found:
            raise ValueError(f"there is no file {name}")
        return name

    return check


def keys_file(directory: Path) -> Check:
    """Take the path of a file of client keys, and look into it (H8)."""
    path = path_from(directory)

    def check(value: Any) -> str:
        name: str = path(value)
        try:
            Keys.load(name)
        except KeysInvalid as invalid:
            raise ValueError(str(invalid)) from None
        return name

    return check


def checks(
    environ: Mapping[str, str] | None, directory: Path
) -> Mapping[str, Mapping[str, Check]]:
    """Give section to key to check, for every key that can be set."""
    secrecy = {
        "token_env": set_variable(environ),
        "tls_cert": file_from(directory),
        "tls_key": file_from(directory),
        "tls_ca": file_from(directory),
    }
    return {
        "server": {
            "listen": listens,
            "prefixes": texts(prefix, least=1),
            "body_max_bytes": whole(1_024, unit="bytes"),
            "bodies_max_bytes": whole(1_024, unit="bytes"),
            "connections_max": whole(1, 1_000_000),
            "client_stall_ms": ms(100),
            "drain_ms": ms(0),
            "lame_duck_ms": ms(0),
            "api_keys_file": keys_file(directory),
            "state_dir": path_from(directory),
        },
        "admin": {"listen": listen},
        "router": {
            "attempts": whole(1, 100),
            "queue_limit": whole(0, 1_000_000),
            "queue_ms": ms(0),
            "commit_after_ms": ms(0),
            "keepalive_ms": ms(0),
            "suspect_after": whole(1, 1_000),
            "signals_max": whole(1, 1_000),
            "tool_calls_max": whole(0, 1_000_000),
            "result_ttl_ms": ms(0),
            "thinking_signature": signature,
        },
        "waits": {
            "connect_ms": ms(1),
            "offer_timeout_ms": ms(1),
            "poll_ms": ms(10),
            "busy_wait_ms": ms(1),
            "load_wait_ms": ms(1),
            "idle_grace_ms": ms(1),
            "liveness_ms": ms(1),
            "first_delta_ms": ms(0),
            "usage_wait_ms": ms(0),
            "ghost_ms": ms(0),
        },
        "worker": {
            "name": worker_name,
            "url": worker_url,
            "agent": host_port,
            "command": arguments,
            "port": whole(1, 65_535),
            "model": text,
            "env": variables,
            "cwd": folder_from(directory),
            "slots": whole(1, 65_536),
            "engine": engine,
            "models": texts(model_name),
            "health_url": http_url,
            "settle_ms": ms(0),
            "pin_slots": flag,
            "stop_grace_ms": ms(0),
            "max_restarts": whole(0, 1_000),
            "restart_window_ms": ms(1_000),
            "api_key_env": set_variable(environ),
        },
        "models": {
            "aliases": texts(),
            "fallback": model_name,
            "thinking_max_tokens": whole(0),
            "bios": bios,
            "tool_parse_error": one_of(("fail", "signal")),
            "exit_tools": texts(one_of(SIGNALS)),
            "loop_repeats_max": whole(0, 1_000_000),
        },
        "agents": {"listen": tcp_listens, **secrecy},
        "agent": {
            "name": worker_name,
            "listen": tcp_listens,
            "routers": texts(host_port),
            **secrecy,
        },
    }
