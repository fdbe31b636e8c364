"""Files that are not UTF-8, read as if they were."""

import codecs
import io
from typing import BinaryIO, Final, cast

UTF_8: Final = "utf-8"
PIECE_BYTES: Final = 1 << 16
NOT_OF_FILES: Final = frozenset(
    {"idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"}
)
NO_UTF_8: Final = "embedfarm.no-utf-8"
"""Name of the error handler `_spoil`."""


def _spoil(error: UnicodeError) -> tuple[bytes, int]:
    """Encode bytes that stood for nothing as ones that are in no UTF-8.

    The bytes themselves may be a letter of UTF-8 where two of them meet.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return b"\xff" * (error.end - error.start), error.end


codecs.register_error(NO_UTF_8, _spoil)


def is_encoding(name: str) -> bool:
    """Tell whether Python knows an encoding of files by this name, such as "cp1252"."""
    try:
        "".encode(name)
        return codecs.lookup(name).name not in NOT_OF_FILES
    except (LookupError, ValueError):
        return False


def canonical(encoding: str) -> str:
    """Return the one name of an encoding that has several: of "latin1" and "latin-1" the same."""
    return codecs.lookup(encoding).name


def recode(file: BinaryIO, encoding: str) -> BinaryIO:
    """Return a file's content in UTF-8; bytes that stand for nothing are no UTF-8 in it either."""
    return cast("BinaryIO", io.BufferedReader(_Recoded(file, encoding), PIECE_BYTES))


class _Recoded(io.RawIOBase):
    """A file of another encoding, which is read from its beginning to its end."""

    def __init__(self, file: BinaryIO, encoding: str) -> None:
        super().__init__()
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
        self._left = b""
        self._ended = False

    def readable(self) -> bool:
        """Tell that this file can be read."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # what it is given
        """Read the next bytes into `buffer`, and return their number, 0 at the end."""
        while not self._left and not self._ended:
            piece = self._file.read(PIECE_BYTES)
            self._ended = not piece
            self._left = self._decoder.decode(piece, self._ended).encode(UTF_8, NO_UTF_8)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count
