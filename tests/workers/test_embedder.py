"""Tests of the second stage, with engines that fail in every way."""

from collections.abc import Sequence
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from embedfarm.contract.job_spec import JobSpec
from embedfarm.contract.records import Block, Result, text_checksums
from embedfarm.contract.usage import Parity
from embedfarm.workers import parity
from embedfarm.workers.budgets import Budgets
from embedfarm.workers.cut_results import failure, results_of
from embedfarm.workers.embedder import Embedder, OpenReference
from embedfarm.workers.engines.engine import DeviceFailed, Engine, Finish, OutOfMemory, Tokenised
from embedfarm.workers.engines.null import NullEngine
from embedfarm.workers.leases import Lease, MicroBatch
from embedfarm.workers.parity import sample_rows
from tests.workers.support import NULL, FakeEngine, block_of, lease_of, micro_batch, null_vectors


def run(batch: MicroBatch, embedder: Embedder | None = None) -> list[Result]:
    """The results of a micro-batch."""
    vectors = (embedder or Embedder()).embed(batch)
    return [result for _, result in results_of(batch, vectors, "worker")]


def errors(found: Sequence[Result]) -> dict[int, str]:
    """Reasons of failed chunks, by index of the chunk."""
    return {error.index: error.reason for result in found for error in result.errors}


class SmallDevice(FakeEngine):
    """A device that runs out of memory above a number of padded tokens."""

    tokens_max = 25

    def refuse(self, texts: Sequence[str]) -> None:
        """Raise `OutOfMemory` for a batch that is too large with its padding."""
        if len(texts) * max(map(len, texts)) > self.tokens_max:
            raise OutOfMemory("no room")


class SmallUnpaddedDevice(FakeEngine):
    """A device that runs out of memory above a number of plain tokens."""

    padded = False
    tokens_max = 25

    def refuse(self, texts: Sequence[str]) -> None:
        """Raise `OutOfMemory` for a batch that is too large without padding."""
        if sum(map(len, texts)) > self.tokens_max:
            raise OutOfMemory("no room")


class Picky(FakeEngine):
    """An engine that raises whenever a text with "bad" is in the batch."""

    def refuse(self, texts: Sequence[str]) -> None:
        """Raise an error as a model with a bug does."""
        if any("bad" in text for text in texts):
            raise ValueError("cannot be")


class Broken(FakeEngine):
    """An engine that gives no finite vector for some texts."""

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return NaN, infinity, or a number too large for half precision for some texts."""
        vectors = super().vectors(texts)
        for row, text in enumerate(texts):
            values = {"nan": np.nan, "inf": -np.inf, "huge": 1e6}
            vectors[row, 1] = values.get(text, vectors[row, 1])
        return vectors


class Lost(FakeEngine):
    """A device that has fallen off the bus."""

    def refuse(self, texts: Sequence[str]) -> None:
        """Raise `DeviceFailed`, whatever the texts are."""
        raise DeviceFailed(f"CUDA error, with {len(texts)} texts")


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 60))
def test_results_are_those_of_a_direct_computation(sizes: list[int], budget: int) -> None:
    """Whatever the blocks and the budget, each chunk's vector is its own, under its own index."""
    blocks = [block_of(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    batch = micro_batch(blocks, NullEngine.open(JobSpec(model=NULL)))
    found = run(batch, Embedder(Budgets(batch_tokens_max=budget)))
    texts = [text for block in blocks for text in block.texts]
    expected = null_vectors(texts)
    assert [(r.start, r.count) for r in found] == [(b.start, len(b.texts)) for b in blocks]
    assert np.array_equal(np.concatenate([result.matrix() for result in found]), expected)
    assert b"".join(result.checksums for result in found) == text_checksums(texts)
    assert sum(result.token_count for result in found) == batch.account.real_tokens
    assert batch.account.real_tokens <= batch.account.padded_tokens


@pytest.mark.parametrize("engine", [SmallDevice(), SmallUnpaddedDevice()])
def test_out_of_memory_halves_the_budget(engine: SmallDevice | SmallUnpaddedDevice) -> None:
    """The budget shrinks until batches fit, is remembered for the model, and all rows are right."""
    texts = [f"{index:02d}" + "x" * (index % 9) for index in range(50)]
    spec = JobSpec(model=NULL)
    embedder = Embedder()
    found = run(micro_batch([Block(start=0, texts=texts)], engine, spec), embedder)
    assert not errors(found)
    assert np.array_equal(found[0].matrix(), engine.vectors(texts))
    assert 1 <= embedder.budgets.tokens(spec, engine) <= engine.tokens_max
    engine.batches.clear()
    run(micro_batch([Block(start=0, texts=texts)], engine, spec), embedder)
    assert sum(map(len, engine.batches)) == 50, "nothing was tried twice"
    other = JobSpec(model="another")
    assert embedder.budgets.tokens(other, engine) == engine.batch_tokens


@pytest.mark.parametrize("engine", [SmallDevice(), SmallUnpaddedDevice()])
def test_what_is_left_is_told(engine: SmallDevice | SmallUnpaddedDevice) -> None:
    """The part of all tokens that has no vector yet is told before each device batch."""
    texts = [f"{index:02d}" + "x" * (index % 9) for index in range(50)]
    tokens, told, done = sum(map(len, texts)), list[float](), list[int]()

    def note(_batch: MicroBatch, left: float) -> None:
        told.append(left * tokens)
        done.append(sum(len(text) for ran in engine.batches if fits(ran) for text in ran))

    def fits(ran: Sequence[str]) -> bool:
        try:
            engine.refuse(ran)
        except OutOfMemory:
            return False
        return True

    run(micro_batch([Block(start=0, texts=texts)], engine), Embedder(progress=note))
    assert told == pytest.approx([tokens - before for before in done])
    assert told[0] == told[1] == tokens, "the first was too large"
    assert 0 < told[-1] <= engine.tokens_max


@given(st.lists(st.sampled_from(["one", "two", "bad", "three", ""]), min_size=1, max_size=40))
def test_a_text_that_repeats_goes_through_the_model_once(texts: list[str]) -> None:
    """Each distinct text is run once, and every chunk of it gets its vector, or its reason."""
    engine = Picky()
    blocks = [Block(start=0, texts=texts[:7]), Block(start=len(texts[:7]), texts=texts[7:])]
    batch = micro_batch([block for block in blocks if block.texts], engine)
    found = run(batch)
    good = sorted({text for text in texts if text not in ("bad", "")})
    ran = sorted(text for texts in engine.batches for text in texts if "bad" not in texts)
    assert ran == good
    failed = errors(found)
    assert set(failed) == {i for i, text in enumerate(texts) if text in ("bad", "")}
    assert {failed[i] for i, text in enumerate(texts) if text == "bad"} <= {
        "the model raised ValueError: cannot be"
    }
    vectors = np.concatenate([result.matrix() for result in found])
    for text, vector in zip(texts, vectors, strict=True):
        wanted = engine.vectors([text])[0] if text in good else np.zeros(2)
        assert np.array_equal(vector, wanted)


def test_repeated_texts_take_no_time() -> None:
    """A device is busy half as long when half the texts repeat, and all tokens are counted."""
    engine = NullEngine.open(JobSpec(model="null:8:20000"))
    distinct = [f"{index:04d} " + "x" * 95 for index in range(200)]
    seconds = {}
    for name, texts in (("distinct", distinct), ("repeated", distinct[:100] * 2)):
        batch = micro_batch([Block(start=0, texts=texts)], engine)
        assert sum(result.token_count for result in run(batch)) == 200 * 25
        seconds[name] = batch.forward_seconds
    assert seconds["repeated"] < 0.7 * seconds["distinct"]


class Queueing(FakeEngine):
    """An engine that works by itself, like a GPU: a batch runs, and may fail, when waited for."""

    asynchronous = True

    def __init__(self, tokens_max: int) -> None:
        super().__init__()
        self.tokens_max = tokens_max
        self.waiting = 0
        self.waiting_max = 0

    def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
        """Note that a batch waits; run it when it is finished."""
        self.waiting += 1
        self.waiting_max = max(self.waiting, self.waiting_max)

        def finish() -> NDArray[np.float32]:
            self.waiting -= 1
            return self.forward(batch, rows)

        return finish

    def refuse(self, texts: Sequence[str]) -> None:
        """Raise for batches that are too large, and for "bad" texts."""
        if len(texts) * max(map(len, texts)) > self.tokens_max:
            raise OutOfMemory("no room")
        if any("bad" in text for text in texts):
            raise ValueError("cannot be")


@given(
    st.lists(st.text("abd", min_size=1, max_size=9), min_size=1, max_size=40),
    st.integers(9, 60),
    st.integers(9, 200),
)
def test_the_next_batch_waits_on_the_device(texts: list[str], room: int, budget: int) -> None:
    """Two batches at most are started at a time, and a batch that fails late costs no other row."""
    engine = Queueing(room)
    batch = micro_batch([Block(start=0, texts=texts)], engine)
    (found,) = run(batch, Embedder(Budgets(batch_tokens_max=budget)))
    bad = {index for index, text in enumerate(texts) if "bad" in text}
    assert set(errors([found])) == bad
    good = [index for index in range(len(texts)) if index not in bad]
    expected = FakeEngine().vectors(texts)
    assert np.array_equal(found.matrix()[good], expected[good])
    assert (engine.waiting, engine.waiting_max <= 2) == (0, True)
    if batch.account.batches > 1:
        assert engine.waiting_max == 2


def test_chunk_that_never_fits_fails_alone() -> None:
    """A chunk larger than the device is named; all others are embedded."""
    texts = ["x" * 60, *["yy"] * 20]
    found = run(micro_batch([Block(start=7, texts=texts)], SmallDevice()))
    assert errors(found) == {7: "does not fit on the device: no room"}
    assert not found[0].matrix()[0].any()
    assert np.array_equal(found[0].matrix()[1:], FakeEngine().vectors(texts[1:]))


@given(st.sets(st.integers(0, 59), max_size=12))
def test_engine_that_raises_costs_only_the_chunk(bad: set[int]) -> None:
    """Exactly the chunks that the model cannot take fail, with its words; the others are right."""
    texts = [f"bad {i}" if i in bad else f"text {i}" for i in range(60)]
    blocks = [Block(start=i, texts=texts[i : i + 20]) for i in (0, 20, 40)]
    found = run(micro_batch(blocks, Picky()))
    assert errors(found) == dict.fromkeys(bad, "the model raised ValueError: cannot be")
    vectors = np.concatenate([result.matrix() for result in found])
    for index, text in enumerate(texts):
        expected = np.zeros(2) if index in bad else FakeEngine().vectors([text])[0]
        assert np.array_equal(vectors[index], expected)
    assert all(r.start <= e.index < r.start + r.count for r in found for e in r.errors)


@pytest.mark.parametrize(("dtype", "failed"), [("float32", [1, 2]), ("float16", [1, 2, 3])])
def test_vectors_that_are_not_finite_fail(dtype: str, failed: list[int]) -> None:
    """NaN and infinity are never stored, neither are numbers too large for the stored type."""
    block = Block(start=0, texts=["fine", "nan", "inf", "huge"])
    found = run(micro_batch([block], Broken(), JobSpec(model=NULL, vector_dtype=dtype)))
    assert list(errors(found)) == failed
    assert all("not finite" in reason for reason in errors(found).values())
    assert np.isfinite(found[0].matrix()).all()
    assert not found[0].matrix()[failed].any()
    assert found[0].matrix()[0].tolist() == [4, ord("f")]


class Narrow(FakeEngine):
    """An engine that gives nothing usable for some texts, as half precision may."""

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return NaN for "nan...", and zero for "zero..."."""
        vectors = super().vectors(texts)
        for row, text in enumerate(texts):
            if text.startswith(("nan", "zero")):
                vectors[row] = np.nan if text.startswith("nan") else 0
        return vectors


class Plain(FakeEngine):
    """An engine in float32 that gives the zero vector for one text only."""

    def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return zero for "zero for ever"."""
        vectors = super().vectors(texts)
        vectors[[row for row, text in enumerate(texts) if text == "zero for ever"]] = 0
        return vectors


def test_unusable_vectors_are_made_again_in_float32() -> None:
    """The reference, opened once, makes NaN and zero rows again; a row that stays zero fails."""
    texts = ["fine", "nan one", "zero two", "nan one", "zero for ever"]
    engine, reference, opened = Narrow(), Plain(), []

    def open_reference(engine: Engine, spec: JobSpec) -> Engine:
        opened.append((engine, spec))
        return reference

    embedder = Embedder(open_reference=open_reference)
    embedder._receipts.keep(
        ("j", ""), engine, None
    )  # the parity check opens a reference of its own
    for _ in range(2):
        batch = micro_batch([Block(start=0, texts=texts)], engine)
        (found,) = run(batch, embedder)
        assert [(e.index, e.reason) for e in found.errors] == [
            (4, "the model gave the zero vector")
        ]
        assert np.array_equal(found.matrix()[:4], Plain().vectors(texts[:4]))
        assert batch.account.rows_repeated == 3
    assert len(opened) == 1
    assert sorted(reference.batches[:3]) == [["nan one"], ["zero for ever"], ["zero two"]]


def test_a_reference_that_fails_costs_only_the_bad_rows() -> None:
    """Only the unusable rows fail when the reference cannot be opened."""

    def open_reference(engine: Engine, spec: JobSpec) -> Engine:
        raise ValueError(f"no {spec.model} beside {engine}")

    batch = micro_batch([Block(start=0, texts=["fine", "nan", "zero"])], Narrow())
    (found,) = run(batch, Embedder(open_reference=open_reference))
    assert list(errors([found])) == [1, 2]
    assert batch.parts[0].account.parity is None


def test_a_job_is_checked_once() -> None:
    """The first micro-batch of a job carries the parity of a sample, later ones none."""

    class Rough(FakeEngine):
        """An engine whose vectors are 45 degrees off those of `Exact`."""

        def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
            """Return vectors with equal components."""
            return np.ones((len(texts), 2), np.float32)

    class Exact(FakeEngine):
        """A reference whose vectors point along the first component."""

        def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
            """Return unit vectors along the first component."""
            return np.tile(np.asarray([1, 0], np.float32), (len(texts), 1))

    embedder = Embedder(open_reference=lambda _engine, _spec: Exact())
    first, second = (micro_batch([block_of(0, 30)], Rough()) for _ in range(2))
    run(first, embedder)
    run(second, embedder)
    receipt = first.parts[0].account.parity
    assert receipt is not None
    assert receipt.texts == 8
    assert receipt.reference_least == pytest.approx(np.sqrt(0.5))
    assert receipt.reference_mean == pytest.approx(np.sqrt(0.5))
    assert receipt.composition_least == pytest.approx(1)
    assert "check" in first.account.seconds
    assert second.parts[0].account.parity is None


def test_small_jobs_share_a_receipt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of few texts has the last receipt of its engine; one of many gets its own, once."""
    monkeypatch.setattr(parity, "OWN_TEXTS", 50)
    opened = []

    def open_reference(_engine: Engine, spec: JobSpec) -> Engine:
        opened.append(spec.prompt)
        return FakeEngine()

    def receipt(job: str, texts: int, prompt: str = "", made: str = "1") -> Parity | None:
        engine = FakeEngine()
        engine.fingerprint = {"prompt": prompt}
        block, spec = block_of(0, texts), JobSpec(model=NULL, prompt=prompt)
        lease = lease_of(block, job=job, generation=made)
        batch = micro_batch([block], engine, spec, [lease])
        run(batch, embedder)
        return batch.parts[0].account.parity

    embedder = Embedder(open_reference=open_reference)
    first = receipt("first", 20)
    assert first is not None
    assert not first.shared
    assert receipt("second", 20) == msgspec.structs.replace(first, shared=True)
    assert opened == [""]
    own = [receipt("second", 20), receipt("second", 20), receipt("second", 20)]
    assert [each and each.shared for each in own] == [True, False, None]
    other = receipt("third", 20, prompt="other: ")
    assert other is not None
    assert not other.shared, "another engine"
    again = receipt("second", 20, made="2")
    assert again is not None, "another job of the same name"
    assert again.shared
    monkeypatch.setattr(parity, "SHARED_SECONDS", 0.0)
    late = receipt("fourth", 20)
    assert late is not None
    assert not late.shared
    assert opened == ["", "", "other: ", ""]


def test_jobs_of_one_micro_batch_have_each_a_receipt() -> None:
    """The first job's sample stands for the others, those too whose texts are all in the first."""
    opened = []

    def open_reference(engine: Engine, _spec: JobSpec) -> Engine:
        opened.append(engine)
        return FakeEngine()

    blocks = [block_of(0, 20), block_of(0, 20, "other"), block_of(0, 20)]
    leases = [lease_of(block, job=job) for block, job in zip(blocks, "abc", strict=True)]
    batch = micro_batch(blocks, FakeEngine(), leases=leases)
    run(batch, Embedder(open_reference=open_reference))
    receipts = [part.account.parity for part in batch.parts]
    assert [each and each.shared for each in receipts] == [False, True, True]
    assert len(opened) == 1


def test_reasons_stay_with_the_job_of_their_text() -> None:
    """A text that the engine cannot embed costs its own job a chunk, and the others none."""
    blocks = [Block(start=0, texts=["fine", "bad"]), Block(start=0, texts=["good", "fine"])]
    leases = [lease_of(block, job=job) for block, job in zip(blocks, "ab", strict=True)]
    first, second = run(micro_batch(blocks, Picky(), leases=leases))
    assert list(errors([first])) == [1]
    assert errors([second]) == {}
    assert second.matrix().any(axis=1).all()


@given(st.lists(st.integers(1, 700), min_size=1, max_size=60))
def test_sample_is_small_and_spread(lengths: list[int]) -> None:
    """A sample has one to 8 texts and, if several, at most 512 tokens; the shortest is in it."""
    sizes = np.asarray(lengths)
    sample = sample_rows(sizes, np.arange(len(sizes)))
    assert 1 <= len(sample) <= 8
    assert len(set(sample.tolist())) == len(sample)
    assert sizes[sample].sum() <= 512 or len(sample) == 1
    assert sizes[sample].min() == sizes.min()


def test_an_account_says_what_the_device_did() -> None:
    """Batches, tokens with and without padding, operations, refusals and the budget add up."""
    engine = SmallDevice()
    texts = ["a" * size for size in (5, 5, 4, 1)] + ["b" * 20, "c" * 20]
    batch = micro_batch([Block(start=0, texts=texts)], engine)
    run(batch, Embedder(Budgets(batch_tokens_max=50)))
    account = batch.account
    assert (account.real_tokens, account.flops) == (55 - 5, 55 - 5)  # a text that repeats runs once
    assert account.padded_tokens >= account.real_tokens
    assert account.batches == len(engine.batches) - account.batches_refused
    assert account.batches_refused >= 1
    assert account.budget_tokens <= 25
    assert account.seconds["forward"] > 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_a_batch_takes_is_learned(
    *, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account says after some batches how many seconds a token costs."""
    now = 0.0
    monkeypatch.setattr("embedfarm.workers.embedder.time", SimpleNamespace(monotonic=lambda: now))

    class Slow(Queueing):
        def vectors(self, texts: Sequence[str]) -> NDArray[np.float32]:
            nonlocal now
            now += 2e-4 + 2e-5 * len(texts) * max(map(len, texts))
            return super().vectors(texts)

        def start(self, batch: Tokenised, rows: NDArray[np.intp]) -> Finish:
            finish = super().start(batch, rows)
            if asynchronous:
                return finish
            vectors = finish()
            return lambda: vectors

    engine = Slow(10**9)
    engine.asynchronous = asynchronous
    embedder = Embedder(Budgets(batch_tokens_max=150))
    lengths = np.random.default_rng(0).integers(4, 64, 400)
    texts = [(f"{place:04}" * 16)[:length] for place, length in enumerate(lengths)]
    batch = micro_batch([Block(start=0, texts=texts)], engine)
    run(batch, embedder)
    learned = batch.account.cost_seconds
    assert learned.keys() == {"launch", "token", "pair"}
    assert learned["token"] == pytest.approx(2e-5)


def test_text_without_tokens_fails_by_name() -> None:
    """A text of which the tokenizer makes nothing never reaches the model, whatever is around it.

    In a padded batch it would be a row of padding only, and its vector an accident.
    """
    engine = FakeEngine()
    found = run(micro_batch([Block(start=0, texts=["a", "", "b"])], engine))
    assert errors(found) == {1: "the tokenizer makes no token of it"}
    assert "" not in [text for batch in engine.batches for text in batch]


def test_lost_leases_get_no_result_and_no_time() -> None:
    """A block whose lease is lost does not go through the model and is not committed."""
    engine = FakeEngine()
    batch = micro_batch([block_of(0, 3, "mine"), block_of(3, 3, "theirs")], engine)
    batch.leases[1].lost = True
    found = run(batch)
    assert [result.start for result in found] == [0]
    assert not [text for texts in engine.batches for text in texts if "theirs" in text]
    batch.leases[0].lost = True
    assert run(batch) == []


class Cancelled(FakeEngine):
    """An engine whose micro-batch loses some leases while the third device batch runs."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.leases: list[Lease] = []

    def refuse(self, texts: Sequence[str]) -> None:
        """Mark leases as lost, as a renewal in another thread would."""
        del texts
        for lease in self.leases[: self.count if len(self.batches) == 3 else 0]:
            lease.lost = True


@pytest.mark.parametrize("open_reference", [lambda _engine, _spec: None, lambda engine, _: engine])
def test_work_ends_when_all_leases_are_lost(open_reference: OpenReference) -> None:
    """A cancelled micro-batch ends with the running device batch; nothing is repeated or kept."""
    engine = Cancelled(2)
    batch = micro_batch([block_of(0, 30), block_of(30, 30)], engine)
    engine.leases = batch.leases
    assert run(batch, Embedder(Budgets(batch_tokens_max=20), open_reference)) == []
    assert (len(engine.batches), batch.account.batches) == (3, 3)
    assert not batch.reasons
    assert batch.parts[0].account.parity is None


def test_work_goes_on_while_one_lease_is_ours() -> None:
    """Each vector of a kept lease is its own, also where a lost lease has the same texts."""
    texts = [f"{index:02d}" for index in range(30)]
    engine = Cancelled(1)
    batch = micro_batch([Block(start=30 * i, texts=texts, token_count=60) for i in (0, 1)], engine)
    engine.leases = batch.leases
    found = run(batch, Embedder(Budgets(batch_tokens_max=20)))
    assert [result.start for result in found] == [30]
    assert np.array_equal(found[0].matrix(), engine.vectors(texts))


def test_reasons_from_the_tokenizer_are_kept() -> None:
    """A chunk that was given up on before is named in the result and not run."""
    engine = FakeEngine()
    batch = micro_batch([block_of(0, 2), block_of(2, 2)], engine)
    batch.reasons[3] = "no"
    batch.leases[1].deliveries = 2
    found = run(batch)
    assert [(e.index, e.reason, e.attempts) for e in found[1].errors] == [(3, "no", 2)]
    assert sum(map(len, engine.batches)) == 3


def test_failed_device_blames_no_chunk() -> None:
    """The failure of a whole device is raised, and no chunk fails: a new process starts afresh."""
    with pytest.raises(DeviceFailed, match="with 5 texts"):
        run(micro_batch([block_of(0, 5)], Lost()))


def test_half_precision_is_stored() -> None:
    """`vector_dtype` float16 gives rows of two-byte components."""
    spec = JobSpec(model=NULL, vector_dtype="float16")
    (result,) = run(micro_batch([block_of(0, 4)], NullEngine.open(spec), spec))
    assert (result.dtype, len(result.vectors)) == ("<f2", 4 * 8 * 2)
    expected = null_vectors(block_of(0, 4).texts)
    assert np.allclose(result.matrix(), expected, atol=1e-3)


def test_time_is_shared_by_tokens() -> None:
    """The results' seconds and tokens add up to those of the micro-batch."""
    batch = micro_batch([block_of(0, 10), block_of(10, 30)], FakeEngine())
    found = run(batch)
    assert sum(result.seconds for result in found) == pytest.approx(batch.forward_seconds)
    assert found[1].seconds > found[0].seconds > 0


def test_failure_names_every_chunk() -> None:
    """A block that is given up on keeps its ids and checksums, and every chunk has the reason."""
    block = Block(start=5, texts=["a", "b"], ids=["x", "y"])
    entry_lease = micro_batch([block], FakeEngine()).leases[0]
    lease = Lease("j", entry_lease.entry, block, deliveries=4)
    spec = JobSpec(model=NULL, vector_dtype="float16")
    result = failure(lease, spec, 3, "worker", "why")
    assert [(e.index, e.reason, e.attempts) for e in result.errors] == [
        (5, "why", 4),
        (6, "why", 4),
    ]
    assert result.matrix().shape == (2, 3)
    assert not result.matrix().any()
    assert (result.ids, result.checksums) == (["x", "y"], text_checksums(["a", "b"]))
