"""Tests of bodies in JSON: what is counted of them, and what is still accepted."""

import json
import re
from typing import Any

import pytest
import redis
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from embedfarm.web.auth.keys import Scope, make_key
from embedfarm.web.http import bodies
from tests.support import LiveServer
from tests.web.conftest import client_of

STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a"\\,:[]{}\n\U0001f600', max_size=9),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=3), inner),
)


@given(VALUES, st.integers(1, 9), st.booleans())
def test_strings_are_not_counted(value: object, size: int, ascii_: bool) -> None:  # noqa: FBT001 # made
    """Strings are left out of the count, whatever is in them and wherever a piece ends."""
    data = json.dumps(value, ensure_ascii=ascii_).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "PIECE_BYTES", size)
        outside = b"".join(bodies._outside_strings(data))
    assert outside == STRING.sub(b"", data)


def test_large_bodies_are_taken(server: LiveServer, client: redis.Redis) -> None:
    """Large bodies are accepted: texts full of commas, many token ids, thousands of texts."""
    del client
    texts = ['",[{:\\' * 60_000, "naïve", "\U0001f600"]
    ids = [[30_000] * 146] * 2048
    limits: dict[str, Any] = {"models": ("null:2",), "accept_token_ids": True}
    limits["lane_seconds_max"] = 0.1
    with client_of(server, **limits) as web:
        feed = web.post("/v1/feeds", json={}).json()["job"]
        sent = web.post(f"/v1/jobs/{feed}/texts", json={"start": 0, "texts": texts})
        assert sent.json() == {"next": 3}
        assert "tokenizer.json" in refused(web, ids)  # the body was read
        assert "no answer within" in refused(web, ["a"] * 2048)
        assert web.post("/v1/jobs", json={"texts": ["a" * 40] * 90_000}).status_code == 201


def refused(web: TestClient, given_: object) -> str:
    """The reason why there are no vectors of some input."""
    answer = web.post("/v1/embeddings", json={"model": "null:2", "input": given_})
    assert answer.status_code in {400, 503}
    return str(answer.json()["error"]["message"])


def test_who_may_not_is_told_first(server: LiveServer, client: redis.Redis) -> None:
    """A key without the scope gets 403 even for a body that is wrong."""
    del client
    secret, key = make_key("ann", [Scope.READ])
    with client_of(server, [key]) as web:
        web.headers["authorization"] = f"Bearer {secret}"
        for body in (b"x", b'{"start": -1}', b"[" + b"1," * 999_999 + b"1]"):
            headers = {"content-type": "application/json"}
            answer = web.post("/v1/jobs/none/close", content=body, headers=headers)
            assert answer.status_code == 403
