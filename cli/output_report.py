"""Report of a finished output, as `embedfarm embed` prints it."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins
from rich.console import Console

from embedfarm.cli.options import print_json
from embedfarm.contract.formatting import counted, describe_reuse
from embedfarm.contract.spending import Estimate

if TYPE_CHECKING:
    from embedfarm.collector.manifest import Changes, Manifest
    from embedfarm.collector.store_export import ExportReport


def report(
    manifest: "Manifest",
    out: Path,
    *,
    before: "Manifest | None",
    exported: "ExportReport | None" = None,
    as_json: bool,
) -> None:
    """Print where the vectors are and how fast the run was; `before` is an earlier manifest."""
    repaired = before.failed - manifest.failed if before else 0
    embedded = sum(figures.chunks for figures in manifest.workers.values())
    rate = embedded / manifest.embed_seconds if manifest.embed_seconds else 0.0
    tokens = manifest.tokens / manifest.embed_seconds if manifest.embed_seconds else 0.0
    if as_json:
        print_json(
            {
                "out": str(out),
                "finished_before": before is not None,
                "repaired": repaired,
                "count": manifest.count,
                "failed": manifest.failed,
                "skipped": manifest.skipped,
                "reused": manifest.reused,
                "changes": manifest.changes and to_builtins(manifest.changes),
                "dimensions": manifest.dimensions,
                "tokens": manifest.tokens,
                "load_seconds": manifest.load_seconds,
                "embed_seconds": manifest.embed_seconds,
                "chunks_per_second": rate,
                "tokens_per_second": tokens,
                **manifest.spent._asdict(),
                **manifest.estimate,
                "workers": {n: w.chunks for n, w in manifest.workers.items()},
                "accounts": manifest.accounts,
                "exported": exported and to_builtins(exported),
            }
        )
        return
    console = Console(highlight=False, soft_wrap=True)
    if repaired:
        console.print(f"{repaired:,} chunks that had failed have their vectors now.")
    elif before is manifest:
        console.print(f"{out} is finished already; nothing to do.")
    console.print(
        f"[bold]{counted(manifest.count - manifest.failed, 'vector')}[/bold] of "
        f"{manifest.dimensions} dimensions in {out} "
        f"({counted(len(manifest.parts), 'part')}, {manifest.format})"
    )
    console.print(
        f"{manifest.embed_seconds:,.1f} s, {rate:,.0f} chunks/s, {tokens:,.0f} tokens/s; "
        f"model loaded in {manifest.load_seconds:,.1f} s; {manifest.spent.words}"
    )
    for line in _details(manifest, out, embedded):
        console.print(f"  {line}")
    for name, figures in sorted(manifest.workers.items()):
        share = figures.chunks / max(1, embedded)
        account = describe_account(manifest.accounts.get(name, {}))
        console.print(f"  {name}: {counted(figures.chunks, 'chunk')} ({share:.0%}){account}")
    for remark in _remarks(manifest, out):
        console.print(remark)


def _details(manifest: "Manifest", out: Path, embedded: int) -> Iterator[str]:
    """Yield what was estimated, which vectors came from where, and what has changed since."""
    from embedfarm.collector.manifest import OWN

    if manifest.estimate:
        yield f"estimated were {Estimate(**manifest.estimate).words}"
    for directory, count in manifest.reused.items():
        whence = "the same text before" if directory == OWN else directory
        yield f"{counted(count, 'chunk')} ({count / manifest.count:.0%}) from {whence}"
    cached = sum(account.get("chunks_cached", 0) for account in manifest.accounts.values())
    if cached:
        yield f"{counted(cached, 'chunk')} from the vector cache of the workers' hosts"
    if manifest.reused:
        yield describe_reuse(sum(manifest.reused.values()), embedded, manifest.embed_seconds)
    if manifest.changes is not None:
        yield _describe_changes(manifest.changes, out)


def _describe_changes(changes: "Changes", out: Path) -> str:
    """Describe how many chunks are not what they were in another output."""
    from embedfarm.collector.manifest import CHANGES_FILE

    kinds = ("added", "changed", "moved", "removed")
    counts = ", ".join(f"{getattr(changes, kind):,} {kind}" for kind in kinds)
    return f"{counts} since {changes.since}: {out / CHANGES_FILE}"


def _remarks(manifest: "Manifest", out: Path) -> Iterator[str]:
    """Yield what people should know of an output beside its vectors, in rich's markup."""
    from embedfarm.collector.manifest import ERRORS_FILE, SKIPPED_FILE, find_listing

    if manifest.skipped:
        listing = find_listing(out, SKIPPED_FILE)
        yield f"[yellow]{counted(manifest.skipped, 'bad row')} skipped[/yellow]: {listing}"
    if manifest.repeated_ids is not None:
        repeated = manifest.repeated_ids
        yield (
            f"[yellow]{counted(repeated.count, 'chunk')} with the id of an earlier one[/yellow]: "
            f"the first is chunk {repeated.first:,}, with the id of chunk {repeated.earlier:,}"
        )
    full, empty = (
        sum(account.get(name, 0) for account in manifest.accounts.values())
        for name in ("texts_full", "texts_empty")
    )
    if empty:
        yield (
            f"[yellow]{counted(empty, 'chunk')} without a text[/yellow]: an empty one, or white "
            "space alone, has a vector as any other"
        )
    if full:
        yield (
            f"[yellow]{counted(full, 'chunk')} at the model's limit[/yellow]: what a text has "
            "beyond it is in no vector (--long windows takes it in, --long error names such texts)"
        )
    if manifest.failed:
        listing = find_listing(out, ERRORS_FILE)
        yield f"[red]{counted(manifest.failed, 'chunk')} failed[/red]: {listing}"


def describe_account(account: dict[str, Any]) -> str:
    """Describe in half a line what a worker's device did in this run; "" for nothing."""
    if not account.get("engine"):
        return ""
    words = [account["engine"]]
    names = {"busy_ratio": "busy", "padding_ratio": "padding", "peak_ratio": "of the device's peak"}
    words += [f"{account[key]:.0%} {name}" for key, name in names.items() if key in account]
    if account["parity"]:
        words.append(f"cosine with float32 at least {account['parity']['reference_least']:.5f}")
    return "; " + ", ".join(words)
