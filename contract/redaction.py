"""URLs for people, logs and records, without what is secret in them.

A URL may carry a password before its host, and a signature or a key in its query. Whatever leaves
the process that was given a URL, other than to the URL's own server, goes through this module.
"""

import hashlib
import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import parse_qsl

HIDDEN: Final = "***"
CORPUS_CHARACTERS_MAX: Final = 500  # of the name of a corpus

_SCHEME: Final = r"[a-z][a-z0-9+.-]*://"
_START: Final = re.compile(_SCHEME, re.IGNORECASE)
# fsspec chains URLs with "::" between them, which an IPv6 address has as well.
_IN_TEXT: Final = re.compile(rf"({_SCHEME})((?:(?!::{_SCHEME})[^\s\"'])*)", re.IGNORECASE)
_WHOLE: Final = re.compile(rf"({_SCHEME})((?:(?!::{_SCHEME}).)*)", re.IGNORECASE | re.DOTALL)
_SERVER: Final = re.compile(r"(rediss?|unix|(rediss?\+)?sentinel)://", re.IGNORECASE)
_WEB: Final = re.compile(r"https?://", re.IGNORECASE)
_KEYED: Final = re.compile(r"(qdrant|milvus)(\+https)?://", re.IGNORECASE)  # a user may be a key
# Arguments that say who asks, and until when, and not what is asked for: those that the signed
# URLs of AWS, Google, Azure, CloudFront, Alibaba, Tencent and Akamai have, and usual names of keys.
_WHO_ASKS: Final = re.compile(
    r"(x-(amz|goog|ms|oss|cos|obs)-.*|q-.*|.*accesskeyid|googleaccessid|key-pair-id|policy|"
    r"hdnea|hdnts|s[vrpseti]|ss|srt|spr|sip|sk(oid|tid|[tesv])|"
    r"sig|sign|signature|.*[-_]signature|hmac|exp|expires?|expiry|auth.*|"
    r".*(token|secret|passw(or)?d|key|credentials?))",
    re.IGNORECASE,
)
_LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(message)s"


def hide_secrets(text: str) -> str:
    """Return a text with `***` for the password and the query of each of its URLs.

    A query of a Redis server's URL keeps all but its passwords. What follows the `?` of a URL that
    is not http is hidden if it has an `=`; otherwise it is a pattern of names.
    """
    return _IN_TEXT.sub(_hide, text)


def hide_in_word(word: str) -> str:
    """Hide secrets like `hide_secrets`, but in a text whose first URL goes on to its end."""
    return _WHOLE.sub(_hide, word)


def hide_job_directories(text: str, root: Path) -> str:
    """Return a text in which the files of jobs by HTTP are named without the job's directory.

    Args:
        text: A sentence for people.
        root: Directory below which each of these jobs has one.
    """
    return re.sub(rf"{re.escape(str(root))}/[^/\s]+/", "", text)


def hide_password(url: str) -> str:
    """Return a Redis server's URL without its passwords, also where a password breaks the URL."""
    shown = re.sub(r"(password=)[^&]*", rf"\1{HIDDEN}", url)
    # A scheme is never taken for a user; possessive quantifiers lose groups in Python 3.11.2.
    words = r"^([\w+]+://|(?![\w+]+://))([^:]*):.*@"
    return re.sub(words, rf"\1\2:{HIDDEN}@", shown, flags=re.DOTALL)


def hide_urls(text: str) -> str:
    """Hide secrets like `hide_secrets`, but all of an http URL behind its host, the path too."""
    return _IN_TEXT.sub(_hide_path, text)


def name_source(source: str) -> str:
    """Return the name of a source in records: itself, or a URL without its secrets.

    Two URLs have the same name if scheme, host, path and all arguments are the same except those
    that say who asks, such as a signature, which is another one each time. A digest stands for the
    arguments that count. The name of a name is that name.
    """
    if not _START.search(source) or is_hidden(source):
        return source
    shown = hide_in_word(source)
    query = _cut(source, "?#")[2] if shown.endswith(f"?{HIDDEN}") else ""
    asked = sorted(
        p for p in parse_qsl(query, keep_blank_values=True) if not _WHO_ASKS.fullmatch(p[0])
    )
    if not asked:
        return shown
    return f"{shown}&sha256={hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]}"


def name_corpus(sources: Sequence[str], jobs_path: Path) -> str:
    """Return the name of a corpus in records: the names of its sources, local ones in full.

    A corpus of many sources has a digest of their names instead of what would make it longer than
    `CORPUS_CHARACTERS_MAX`. Standard input has no name, nor have uploads, which are one job's.

    Args:
        sources: Paths and URLs.
        jobs_path: Directory that has the uploads.
    """
    names = [
        name_source(each) if _START.search(each) else str(Path(each).absolute()) for each in sources
    ]
    if "-" in sources or any(Path(each).is_relative_to(jobs_path) for each in names):
        return ""
    name = " ".join(names)
    if len(name) <= CORPUS_CHARACTERS_MAX:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
    return f"{name[: CORPUS_CHARACTERS_MAX - 17]} {digest}"


def is_hidden(source: str) -> bool:
    """Tell whether a source is a URL without its secrets, by which it cannot be read."""
    return _START.search(source) is not None and HIDDEN in source


def start_logging(level: int) -> None:
    """Log to standard error, without the secrets of URLs in anything that is logged."""
    handler = logging.StreamHandler()
    handler.setFormatter(hiding_formatter(_LOG_FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


def hiding_formatter(layout: str) -> logging.Formatter:
    """Return a formatter of log records by a layout, without the secrets of URLs."""
    return _HidingFormatter(layout)


class _HidingFormatter(logging.Formatter):
    """Formatter that hides secrets in the whole of a record, its traceback included."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record without secrets."""
        return hide_secrets(super().format(record))


def _hide_path(found: re.Match[str]) -> str:
    """Return no more than scheme and host of an http URL; hide the secrets of another one."""
    scheme, rest = found.groups()
    if not _WEB.fullmatch(scheme):
        return _hide(found)
    host, mark, _ = _cut(_cut_user(rest)[2], "/?#")
    return f"{scheme}{host}/…" if mark else scheme + host


def _hide(found: re.Match[str]) -> str:
    """Return one URL without its secrets."""
    scheme, rest = found.groups()
    if _SERVER.fullmatch(scheme):
        return hide_password(scheme + rest)
    user, at, rest = _cut_user(rest)
    if at and (":" in user or _WEB.fullmatch(scheme) or _KEYED.fullmatch(scheme)):
        user = HIDDEN
    place, mark, query = _cut(rest, "?#")
    if query and (_WEB.fullmatch(scheme) or "=" in query):
        mark, query = "?", HIDDEN
    return scheme + user + at + place + mark + query


def _cut(text: str, marks: str) -> tuple[str, str, str]:
    """Split a text like `str.partition`, but at the first of several characters."""
    end = next((place for place, each in enumerate(text) if each in marks), len(text))
    return text[:end], text[end : end + 1], text[end + 1 :]


def _cut_user(rest: str) -> tuple[str, str, str]:
    """Split off user and password, and the @ behind them, also where a password breaks the URL."""
    first = _cut(rest, "/?#")[0]
    if "@" not in first:
        port = first.rpartition(":")[2] if not first.endswith("]") else ""
        torn = ":" in first and port and not port.isdecimal()
        if not torn or "@" not in rest:
            return "", "", rest
        first = rest
    end = first.rindex("@")
    return rest[:end], "@", rest[end + 1 :]
