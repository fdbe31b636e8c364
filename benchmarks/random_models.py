"""Models of known architectures with random weights: speed does not depend on the values.

    python -m benchmarks.random_models NAME [DIRECTORY]

The models use the tokenizer of all-MiniLM-L6-v2, so that texts have as many tokens as with it.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling
from transformers import (
    AutoModel,
    AutoTokenizer,
    BertConfig,
    ModernBertConfig,
    PreTrainedConfig,
    Qwen3Config,
)

from benchmarks.corpora import MODEL
from embedfarm.contract import model_files

TOKENS_MAX: Final = 512
SEED: Final = 0


@dataclass(frozen=True)
class Architecture:
    """Configuration of a model of a known architecture.

    Attributes:
        config: Configuration of the transformer, as its publisher has it.
        pooling: Mode in which a text's vector is made from those of its tokens.
        padding_side: Side of the padding: left for a decoder, whose last token is pooled.
    """

    config: PreTrainedConfig
    pooling: str
    padding_side: str = "right"


def architectures() -> dict[str, Architecture]:
    """Return the architectures by name of the published model."""
    return {
        "all-minilm-l6": Architecture(
            BertConfig(
                hidden_size=384,
                num_hidden_layers=6,
                num_attention_heads=12,
                intermediate_size=1536,
            ),
            "mean",
        ),
        "bge-base": Architecture(BertConfig(), "cls"),
        "bge-large": Architecture(
            BertConfig(
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=4096,
            ),
            "cls",
        ),
        "modernbert-base": Architecture(ModernBertConfig(), "mean"),
        "qwen3-embedding-0.6b": Architecture(
            Qwen3Config(
                vocab_size=151_669,
                hidden_size=1024,
                num_hidden_layers=28,
                num_attention_heads=16,
                num_key_value_heads=8,
                head_dim=128,
                intermediate_size=3072,
            ),
            "lasttoken",
            padding_side="left",
        ),
    }


def build(architecture: Architecture, directory: Path, seed: int = SEED) -> None:
    """Write a sentence-transformers model in float32, with the same weights each time."""
    torch.manual_seed(seed)
    transformer = directory / "transformer"
    model = AutoModel.from_config(architecture.config)
    model.save_pretrained(transformer)
    tokenizer = AutoTokenizer.from_pretrained(model_files.resolve(MODEL))
    tokenizer.padding_side = architecture.padding_side
    tokenizer.save_pretrained(transformer)
    module = Transformer(str(transformer), max_seq_length=TOKENS_MAX)
    pooling = Pooling(architecture.config.hidden_size, architecture.pooling)
    whole = SentenceTransformer(modules=[module, pooling, Normalize()], device="cpu")
    whole.save(str(directory / "model"))


def main() -> None:
    """Build a model and print its directory."""
    known = architectures()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=tuple(known))
    parser.add_argument("directory", nargs="?", type=Path, default=Path("build/models"))
    arguments = parser.parse_args()
    directory = arguments.directory / arguments.name
    build(known[arguments.name], directory)
    sys.stdout.write(f"{directory / 'model'}\n")


if __name__ == "__main__":
    main()
