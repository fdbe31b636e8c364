"""Reading of RQ's keys, which any program that enqueues may have filled with anything.

A job that cannot be read counts as none. What cannot be read in a list that all jobs share is
removed, since RQ would end over it each time that it looks there.
"""

import contextlib
import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple, TypeVar, cast

import redis
from rq import Queue
from rq.exceptions import InvalidJobOperation, NoSuchGroupError, NoSuchJobError
from rq.executions import Execution
from rq.group import Group
from rq.intermediate_queue import IntermediateQueue
from rq.job import Job, JobStatus, validate_job_id
from rq.registry import (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
)
from rq.scheduler import RQScheduler
from rq.worker_registration import REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY

# What RQ raises over a value that it did not write, or over one of another type.
UNREADABLE: Final = (
    ValueError, TypeError, AttributeError, AssertionError, LookupError, ArithmeticError,
    RecursionError, redis.ResponseError,
)  # fmt: skip
PACKED_BYTES_MAX: Final = 64 << 20  # arguments of a job, or why it failed, once unpacked
FAILURES_MAX: Final = 3  # in a row with nothing to remove: another process may have removed it
LOOKUPS: Final = (
    CanceledJobRegistry,
    DeferredJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    ScheduledJobRegistry,
)

T = TypeVar("T")
log = logging.getLogger(__name__)


class ReadableJob(Job):
    """An RQ job that counts as missing when it cannot be read, so that no process ends over it."""

    @classmethod
    def fetch(
        cls,
        id: str,  # noqa: A002 -- as RQ has it
        connection: redis.Redis | None = None,
        serializer: Any = None,  # noqa: ANN401 -- as RQ has it
    ) -> "ReadableJob":
        """Return the job of that name.

        Raises:
            NoSuchJobError: The job is not there, cannot be read, or no job can have that name.
        """
        try:
            validate_job_id(id)
        except ValueError as error:
            raise NoSuchJobError(f"{id!r} is no name of a job") from error
        return cast("ReadableJob", super().fetch(id, connection, serializer))

    @classmethod
    def fetch_many(
        cls,
        job_ids: Iterable[str],
        connection: redis.Redis,
        serializer: Any = None,  # noqa: ANN401 -- as RQ has it
    ) -> list[Job | None]:
        """Return the jobs, None for each that is not there or cannot be read."""
        return [cls._find(each, connection, serializer) for each in job_ids]

    @classmethod
    def _find(cls, name: str, connection: redis.Redis, serializer: Any) -> Job | None:  # noqa: ANN401 -- as above
        with contextlib.suppress(NoSuchJobError):
            return cls.fetch(name, connection, serializer)
        return None

    def restore(self, raw_data: Any) -> None:  # noqa: ANN401 -- as RQ has it
        """Load the job from the server, unless it unpacks to more than is allowed.

        Raises:
            ValueError: The arguments or the failure unpack to more than `PACKED_BYTES_MAX`.
        """
        for name in (b"data", b"exc_info"):
            _check_packed(raw_data.get(name, b""))
        super().restore(raw_data)

    def refresh(self) -> None:
        """Read the job from the server.

        Raises:
            NoSuchJobError: The job is not there, or whoever wrote it was not RQ.
        """
        try:
            super().refresh()  # type: ignore[no-untyped-call] # RQ is typed in part
        except UNREADABLE as error:
            if not _is_unreadable(error):
                raise
            log.warning("job %s is refused: it cannot be read: %r", self.id, error)
            raise NoSuchJobError(f"{self.id} cannot be read") from error

    def get_executions(self) -> list[Execution]:
        """Return the executions of the job, also those whose record has expired already.

        RQ raises `ValueError` over one, for the minute in which it knows a killed worker's
        execution and has no record of it; the names are enough to cancel a job.
        """
        names = self.execution_registry.get_execution_ids()
        return [Execution(each, self.id, self.connection) for each in names]

    def get_status(self, refresh: bool = True) -> JobStatus:  # noqa: FBT001, FBT002 -- as RQ has it
        """Return what has become of the job.

        Raises:
            InvalidJobOperation: The job is not there, or its status cannot be read.
        """
        try:
            return super().get_status(refresh)
        except UNREADABLE as error:
            if not _is_unreadable(error):
                raise
            raise InvalidJobOperation(f"{self.id} cannot be read") from error

    def forget(self) -> None:
        """Delete the job as RQ does; where RQ cannot, delete at least the job's own keys."""
        try:
            self.delete()
        except (*UNREADABLE, NoSuchGroupError) as error:
            if not _is_unreadable(error):
                raise
            log.warning("job %s is dropped: %r", self.id, error)
            keys = (self.key, self.dependents_key, self.dependencies_key)
            self.connection.delete(*keys, self.execution_registry.key, _results_key(self))


class _Shape(NamedTuple):
    """The shape that a key must have: its type, and what may be a member of it."""

    type: bytes
    is_member: Callable[[bytes], bool]


def over_unreadable(queue: Queue, attempt: Callable[[], T]) -> T:
    """Make an attempt; if it fails over something unreadable, remove that and try again.

    Args:
        queue: Queue whose keys are looked through.
        attempt: Function that may be called more than once; its result is returned.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except UNREADABLE as error:
            if not _is_unreadable(error):
                raise
            failures = 0 if remove_unreadable(queue) else failures + 1
            if failures == FAILURES_MAX:
                raise


def remove_unreadable(queue: Queue) -> bool:
    """Remove what RQ cannot read in keys that a queue's jobs share; tell whether there was any.

    Each thing is named in the log.
    """
    connection = queue.connection
    found = [
        _remove(connection, key, shape)
        for shapes in (_shapes(queue), _group_shapes(connection))
        for key, shape in shapes
    ]
    return any(found)


def remove_foreign(queue: Queue) -> None:
    """Remove the keys that a queue's jobs share and that have another type than RQ gives them.

    No ingest worker reads some of them, so that none would fail over them; programs that enqueue
    would. Only the types are read, however many jobs there are.
    """
    for key, shape in _shapes(queue):
        _remove_foreign(queue.connection, key, shape)


def remove_unreadable_of(job: Job) -> None:
    """Remove what RQ could not read in the keys beside a job's own, before it is run."""
    shapes = {
        job.dependents_key: _Shape(b"set", _is_id),
        job.dependencies_key: _Shape(b"set", _is_id),
        job.execution_registry.key: _Shape(b"zset", _is_text),
        _results_key(job): _Shape(b"stream", _is_text),
    }
    for key, shape in shapes.items():
        _remove(job.connection, key, shape)


def _results_key(job: Job) -> str:
    return f"rq:results:{job.id}"


def _shapes(queue: Queue) -> Iterator[tuple[str, _Shape]]:
    yield queue.key, _Shape(b"list", _is_id)
    yield IntermediateQueue.get_intermediate_queue_key(queue.key), _Shape(b"list", _is_id)
    yield queue.started_job_registry.key, _Shape(b"zset", _is_execution)
    for registry in LOOKUPS:
        yield registry(queue=queue).key, _Shape(b"zset", _is_id)
    workers = (REDIS_WORKER_KEYS, WORKERS_BY_QUEUE_KEY % queue.name)
    for key in (Queue.redis_queues_keys, *workers, Group.REDIS_GROUP_KEY):
        yield key, _Shape(b"set", _is_text)
    yield RQScheduler.get_locking_key(queue.name), _Shape(b"string", _is_text)


def _group_shapes(connection: redis.Redis) -> Iterator[tuple[str, _Shape]]:
    """Yield key and shape of each group whose name can be read."""
    for name in _members(connection, Group.REDIS_GROUP_KEY, b"set"):
        if _is_text(name):
            yield Group.get_key(name.decode()), _Shape(b"set", _is_text)


def _remove(connection: redis.Redis, key: str, shape: _Shape) -> bool:
    """Remove a key of the wrong type, or a key's wrong members; tell whether there were any."""
    if _remove_foreign(connection, key, shape):
        return True
    members = _members(connection, key, shape.type)
    wrong = [each for each in members if not shape.is_member(each)]
    with _of_any_type():
        for member in wrong:
            log.warning("%r is removed from %s: it cannot be read", member, key)
            if shape.type == b"list":
                connection.lrem(key, 0, cast("str", member))
            else:
                (connection.zrem if shape.type == b"zset" else connection.srem)(key, member)
    return bool(wrong)


def _remove_foreign(connection: redis.Redis, key: str, shape: _Shape) -> bool:
    """Remove a key of the wrong type; tell whether it was of one."""
    kind = cast("bytes", connection.type(key))
    if kind in {shape.type, b"none"}:
        return False
    log.warning("%s is removed: it is a %s", key, kind.decode())
    connection.delete(key)
    return True


def _members(connection: redis.Redis, key: str, kind: bytes) -> Collection[bytes]:
    """Return the members of a key that was of that type; none if it is of another by now."""
    with _of_any_type():
        return _read_members(connection, key, kind)
    return ()


@contextlib.contextmanager
def _of_any_type() -> Iterator[None]:
    """Ignore the error of a command on a key that has another type than RQ gives it."""
    try:
        yield
    except redis.ResponseError as error:
        if not _is_unreadable(error):
            raise


def _read_members(connection: redis.Redis, key: str, kind: bytes) -> Collection[bytes]:
    if kind == b"list":
        return cast("list[bytes]", connection.lrange(key, 0, -1))
    if kind == b"zset":
        return cast("list[bytes]", connection.zrange(key, 0, -1))
    return cast("set[bytes]", connection.smembers(key)) if kind == b"set" else ()


def _check_packed(data: bytes) -> None:
    unpacker = zlib.decompressobj()
    with contextlib.suppress(zlib.error):  # not packed: RQ takes it as it is
        unpacker.decompress(data, PACKED_BYTES_MAX)
    if unpacker.unconsumed_tail:
        raise ValueError(f"more than {PACKED_BYTES_MAX >> 20} MiB are packed in it")


def _is_text(member: bytes) -> bool:
    try:
        member.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_id(member: bytes) -> bool:
    """Tell whether a job can have that name."""
    try:
        validate_job_id(member.decode())
    except ValueError:
        return False
    return True


def _is_execution(member: bytes) -> bool:
    """Tell whether `member` names a job, and the run of it that is under way."""
    return all(_is_id(each) for each in member.split(b":", 1))


def _is_unreadable(error: BaseException) -> bool:
    """Tell whether an error is due to the data that was read, and not to the server."""
    return not isinstance(error, redis.ResponseError) or "WRONGTYPE" in str(error)
