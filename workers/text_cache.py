"""Texts of a micro-batch that need no device, since their vectors lie in the vector cache."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Final, Self

import numpy as np

from embedfarm.contract.canaries import Canaries, canaries_of, disagreement
from embedfarm.contract.settings import Settings
from embedfarm.workers.engines.tokens import Tokens
from embedfarm.workers.leases import CachedTexts, MicroBatch
from embedfarm.workers.vector_cache import VectorCache

DIRECTORY: Final = "embedfarm-vectors"  # below the one that the settings name
KEY_BYTES: Final = 16  # a shorter digest would let two texts that somebody looks for have one
SALT_BYTES: Final = 32
ID_BYTES: Final = 4


@dataclass(frozen=True)
class TextCache:
    """Vectors of texts by all that decides them: a worker without a cache finds and keeps none.

    Attributes:
        store: The vectors, None where the settings name no directory.
    """

    store: VectorCache | None = None

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Return the cache that the settings ask for."""
        if settings.vector_cache_directory is None:
            return cls()
        directory = settings.vector_cache_directory.expanduser() / DIRECTORY
        return cls(VectorCache(directory, settings.vector_cache_bytes_max))

    def look_up(self, batch: MicroBatch, canaries: Canaries | None) -> None:
        """Find the texts of a micro-batch whose vectors are there, unless that was done.

        Args:
            batch: The micro-batch, whose `cached` is what was found.
            canaries: What its engine makes of the canaries. None while that is not known, and then
                nothing is looked up: an engine may have the right files and make other vectors.
        """
        if self.store is None or canaries is None or batch.cached is not None:
            return
        began = time.monotonic()
        salt = _salt(self.store, batch, canaries)
        keys = list(_keys(batch, salt))
        lengths = batch.tokenised.text_lengths
        usable = lengths > 0
        usable[list(batch.reasons)] = False
        wanted = np.flatnonzero(usable).tolist()
        size = batch.engine.dimensions
        found = self.store.find(list(dict.fromkeys(keys[text] for text in wanted)))
        found = {key: each for key, each in found.items() if each.vector.shape == (size,)}
        texts = np.asarray([text for text in wanted if keys[text] in found], np.intp)
        vectors = np.asarray([found[keys[text]].vector for text in texts], np.float32)
        share = float(lengths[texts].sum() / max(1, lengths.sum()))
        batch.cached = CachedTexts(keys, texts, vectors.reshape(-1, size), share)
        batch.cached.new = {k: each.vector for k, each in found.items() if each.fades}
        for part in batch.parts:
            first, end = np.searchsorted(texts, (part.texts.start, part.texts.stop))
            part.account.chunks_cached = int(end - first)
        batch.account.spend("cache", time.monotonic() - began)

    def keep(self, batch: MicroBatch) -> None:
        """Keep the vectors that the device made; it was asked since whether it computes rightly."""
        if self.store is not None and batch.cached is not None:
            self.store.keep(batch.cached.new)


def _salt(store: VectorCache, batch: MicroBatch, canaries: Canaries) -> bytes:
    """Return a digest of what decides the vector of a text, but the text.

    That is the engine, its fingerprint, and what it makes of the canaries: those that the first one
    like it made here, since equal engines may differ in the last bits. If they are too far from
    these, it has vectors of its own.
    """
    engine = batch.engine
    words = json.dumps([engine.name, engine.fingerprint, canaries.texts], sort_keys=True).encode()
    family = blake2b(words, digest_size=KEY_BYTES, person=b"family").digest()
    own = canaries.matrix()
    first = store.find([family]).get(family)
    if first is None or first.vector.size != own.size:
        store.keep({family: own.ravel()})
        return blake2b(words + canaries.vectors, digest_size=SALT_BYTES).digest()
    if first.fades:
        store.keep({family: first.vector})
    known = canaries_of(first.vector.reshape(own.shape), tuple(canaries.texts))
    chosen = canaries if disagreement(known, canaries, batch.dtype) else known
    return blake2b(words + chosen.vectors, digest_size=SALT_BYTES).digest()


def _keys(batch: MicroBatch, salt: bytes) -> Iterator[bytes]:
    """Yield the key of each text of a micro-batch."""
    for kind, content in _contents(batch):
        yield blake2b(content, digest_size=KEY_BYTES, key=salt, person=kind).digest()


def _contents(batch: MicroBatch) -> Iterator[tuple[bytes, bytes | memoryview]]:
    """Yield for each text what the model makes its vector of: its token ids, or else itself.

    The first blocks of a job may be texts, and the others ids; both have one vector.
    """
    tokens = batch.tokenised.features
    if batch.engine.tokenisation is not None and isinstance(tokens, Tokens):
        ids = memoryview(tokens.columns["input_ids"].astype("<u4").tobytes())
        for first, end in pairwise([0, *(ID_BYTES * tokens.ends).tolist()]):
            yield b"ids", ids[first:end]
        return
    for lease in batch.leases:
        made = lease.block.tokens
        kind = b"text" if made is None else b"ids of %d" % made.width
        for each in lease.block.identities():
            yield kind, each.encode() if isinstance(each, str) else each
