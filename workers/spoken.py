"""What a supervised server says: always drained, its last lines kept (L8, B104).

Two pipes into one bounded ring and one bounded log file. Lines may be of any
length and hold any bytes; nothing a server writes is held for longer, and none
of it can make it wait for us.
"""

import os
import re
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from router.openai.worker_errors import without_keys

#: Lines kept in memory, and bytes of each.
LINES_MAX: Final = 200
LINE_MAX: Final = 2_000
#: Bytes of a log file before it becomes ``NAME.log.1``, of which there is one.
LOG_MAX: Final = 8 * 1024 * 1024
#: Bytes taken at once, and reads in one go before all other tasks get their turn.
READ_SIZE: Final = 65_536
READS_MAX: Final = 4
_OWNER_ONLY: Final = 0o600
#: Colours and other orders to a terminal, and whatever else can't be shown.
_CONTROL: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Pipe:
    """Our end of a pipe that a server writes to, and the line it is in."""

    def __init__(self, descriptor: int) -> None:
        """Own *descriptor*, which does not block."""
        self.descriptor = descriptor
        self._line = bytearray()

    def read(self) -> bytes | None:
        """Take what is there: None for nothing now, b"" for the end."""
        try:
            return os.read(self.descriptor, READ_SIZE)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def lines(self, octets: bytes) -> list[str]:
        """Add *octets*; give the lines that are whole now, without blank ones.

        A carriage return ends one too: it is how progress is written.
        """
        *whole, rest = octets.replace(b"\r", b"\n").split(b"\n")
        found = []
        for piece in whole:
            self._add(piece)
            found += self.rest()
        self._add(rest)
        return found

    def rest(self) -> list[str]:
        """End the line that it is in, and give it, if it is one."""
        line = _CONTROL.sub("", self._line.decode("utf-8", "replace")).strip()
        self._line.clear()
        return [line] if line else []

    def _add(self, piece: bytes) -> None:
        # What is beyond is in the log file, and nowhere else.
        self._line += piece[: max(0, LINE_MAX - len(self._line))]


class LogFile:
    """A file that two sizes bound; a disk that is full stops it, and nothing else."""

    def __init__(self, path: Path) -> None:
        """Append to *path*, which only its owner may read."""
        self._path = path
        self._file: int | None = None
        self._size = 0
        self._open()

    def _open(self) -> None:
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(self._path, flags, _OWNER_ONLY)
            self._size = os.fstat(self._file).st_size

    def write(self, octets: bytes) -> None:
        """Add *octets* as they are. Blocks for as long as the disk does."""
        if self._file is None:
            return
        try:
            if self._size + len(octets) > LOG_MAX:
                self.close()
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._open()
            if self._file is not None:
                self._size += os.write(self._file, octets)
        except OSError:
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
            self._file = None


class Spoken:
    """The last lines of a server over all its lives."""

    def __init__(self, log: Path | None, secrets: Collection[str] = ()) -> None:
        """Hold nothing yet.

        Args:
            log: the file for all of it; None: only the ring.
            secrets: never shown in the last line (H8).
        """
        self._log = log
        self._secrets = secrets
        self._file: LogFile | None = None
        #: Oldest first, at most ``LINES_MAX`` lines of ``LINE_MAX`` bytes.
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        self._last = ""
        self._last_error = ""

    @property
    def last(self) -> str:
        """Its last line on stderr, in this life; else on stdout; else empty."""
        last = without_keys(self._last_error or self._last)
        for secret in self._secrets:
            last = last.replace(secret, "[key]")
        return last

    def begin(self) -> None:
        """A new life begins; the ring goes on."""
        self._last = self._last_error = ""
        if self._log is not None:
            self._file = LogFile(self._log)

    def end(self) -> None:
        """Its life is over."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def take(self, pipe: Pipe, *, stderr: bool) -> bool | None:
        """Take what *pipe* holds, but not for long.

        Returns: True where there may be more, None for nothing now, False at the
            end.
        """
        for _ in range(READS_MAX):
            octets = pipe.read()
            if octets is None:
                return None
            if self._file is not None:
                self._file.write(octets)
            self._keep(pipe.lines(octets), stderr=stderr)
            if not octets:
                self.finish(pipe, stderr=stderr)
                return False
        return True

    def finish(self, pipe: Pipe, *, stderr: bool) -> None:
        """Count the line that *pipe* is in as whole: nobody will end it."""
        self._keep(pipe.rest(), stderr=stderr)

    def _keep(self, lines: list[str], *, stderr: bool) -> None:
        self.lines += lines
        if lines and stderr:
            self._last_error = lines[-1]
        elif lines:
            self._last = lines[-1]
