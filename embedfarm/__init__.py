"""embedfarm turns a corpus into vectors on every device you have.

    import embedfarm

    vectors = embedfarm.embed("corpus.jsonl", out="vectors/")
    vectors = embedfarm.open("vectors/")

    with embedfarm.Farm() as farm:
        farm.encode(["a text", "another"])

Names are imported when they are used. The rooms of the package lie beside it in the source tree,
which so shows the data's path; they are links here (`embedfarm/producer -> ../producer`), and files
in what is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from embedfarm.contract.errors import EmbedfarmError
    from embedfarm.embedding import Reading, embed
    from embedfarm.farm import Farm
    from embedfarm.outputs import Embeddings
    from embedfarm.outputs import open_output as open  # noqa: A004 # embedfarm.open

_PLACES: Final = {
    "EmbedfarmError": ("embedfarm.contract.errors", "EmbedfarmError"),
    "Embeddings": ("embedfarm.outputs", "Embeddings"),
    "Farm": ("embedfarm.farm", "Farm"),
    "Reading": ("embedfarm.embedding", "Reading"),
    "embed": ("embedfarm.embedding", "embed"),
    "open": ("embedfarm.outputs", "open_output"),
}

__all__ = ["Embeddings", "EmbedfarmError", "Farm", "Reading", "__version__", "embed", "open"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 # whatever is asked for
    """Import what is asked for, or look up the version."""
    if name == "__version__":
        return import_module("importlib.metadata").version("embedfarm")
    if name not in _PLACES:
        raise AttributeError(f"module 'embedfarm' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    """List what can be imported from here."""
    return __all__
