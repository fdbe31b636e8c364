"""Small random models of every kind that the engine must serve, built without a network."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Router, Transformer
from sentence_transformers.sentence_transformer.modules import (
    BoW,
    Normalize,
    Pooling,
    StaticEmbedding,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaModel,
)

SENTENCES: Final = (
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "A farm turns a corpus into vectors on every device that you have.",
    "Longest chunks go first, because running out of memory then happens at once.",
    "Query: what is the capital of France? Passage: Paris has been it for long.",
)
LENGTH_MAX: Final = 64
DIMENSIONS: Final = 32


def word_pieces() -> Tokenizer:
    """A WordPiece tokenizer with BERT's frame around each text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106 # a word of the vocabulary
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=300, special_tokens=special)
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(word, tokenizer.token_to_id(word)) for word in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def byte_pairs() -> Tokenizer:
    """A byte-level BPE tokenizer that ends each text, as embedding models on decoders do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|end|>", special_tokens=[("<|end|>", tokenizer.token_to_id("<|end|>"))]
    )
    return tokenizer


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """WordPiece tokens, padded on the right."""
    return PreTrainedTokenizerFast(
        tokenizer_object=word_pieces(),
        pad_token="[PAD]",  # noqa: S106 # a word of the vocabulary
        unk_token="[UNK]",  # noqa: S106 # same
        cls_token="[CLS]",  # noqa: S106 # same
        sep_token="[SEP]",  # noqa: S106 # same
        mask_token="[MASK]",  # noqa: S106 # same
        model_max_length=LENGTH_MAX,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def bert(directory: Path, inner: int = 64) -> Transformer:
    """BERT, the commonest transformer.

    Args:
        directory: Directory for its files.
        inner: Width inside its layers, which decides how much memory a token takes.
    """
    tokenizer = bert_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=DIMENSIONS,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=inner,
        max_position_embeddings=LENGTH_MAX,
        initializer_range=0.2,
    )
    return _transformer(BertModel(config), tokenizer, directory)


def roberta(directory: Path) -> Transformer:
    """A transformer that begins to count positions behind the number of its padding token."""
    tokenizer = bert_tokenizer()
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=DIMENSIONS,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH_MAX + 1,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.2,
    )
    return _transformer(XLMRobertaModel(config), tokenizer, directory)


def modern_bert(directory: Path) -> Transformer:
    """A transformer most of whose layers see only what is near, and positions by rotation."""
    tokenizer = bert_tokenizer()
    config = ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=DIMENSIONS,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=LENGTH_MAX,
        local_attention=8,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        pad_token_id=tokenizer.pad_token_id,
        **dict.fromkeys(("bos_token_id", "cls_token_id"), tokenizer.cls_token_id),
        **dict.fromkeys(("eos_token_id", "sep_token_id"), tokenizer.sep_token_id),
        initializer_range=0.2,
    )
    return _transformer(ModernBertModel(config), tokenizer, directory)


def decoder_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE tokens, padded on the left."""
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_pairs(),
        pad_token="<|pad|>",  # noqa: S106 # a word of the vocabulary
        eos_token="<|end|>",  # noqa: S106 # same
        padding_side="left",
        model_max_length=LENGTH_MAX,
        model_input_names=["input_ids", "attention_mask"],
    )


def decoder(directory: Path) -> Transformer:
    """A causal transformer with byte-level BPE tokens, padded on the left."""
    tokenizer = decoder_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=DIMENSIONS,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH_MAX,
        initializer_range=0.2,
    )
    return _transformer(Qwen2Model(config), tokenizer, directory)


def wide_decoder(directory: Path) -> Transformer:
    """A causal transformer whose heads two and four processes can share."""
    tokenizer = decoder_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        intermediate_size=96,
        max_position_embeddings=LENGTH_MAX,
        initializer_range=0.2,
    )
    return _transformer(Qwen3Model(config), tokenizer, directory)


def _transformer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path
) -> Transformer:
    """The first module of a model, from files as a hub would have them."""
    directory.mkdir()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    module: Transformer = Transformer(str(directory))
    return module


def mean_pooled(directory: Path) -> SentenceTransformer:
    """BERT with mean pooling and normalisation: the commonest kind."""
    return SentenceTransformer(
        modules=[bert(directory), Pooling(DIMENSIONS, "mean"), Normalize()], device="cpu"
    )


def cls_pooled(directory: Path) -> SentenceTransformer:
    """BERT with the first token's vector."""
    return SentenceTransformer(modules=[bert(directory), Pooling(DIMENSIONS, "cls")], device="cpu")


def roberta_pooled(directory: Path) -> SentenceTransformer:
    """XLM-RoBERTa with the first token's vector, as multilingual models have it."""
    return SentenceTransformer(
        modules=[roberta(directory), Pooling(DIMENSIONS, "cls"), Normalize()], device="cpu"
    )


def windowed(directory: Path) -> SentenceTransformer:
    """ModernBERT with mean pooling; most of its layers see only near tokens."""
    return SentenceTransformer(
        modules=[modern_bert(directory), Pooling(DIMENSIONS, "mean")], device="cpu"
    )


def last_token_pooled(directory: Path) -> SentenceTransformer:
    """A decoder with the last token's vector: wrong as soon as the padding side is."""
    return SentenceTransformer(
        modules=[decoder(directory), Pooling(DIMENSIONS, "lasttoken")], device="cpu"
    )


def shared(directory: Path) -> SentenceTransformer:
    """A decoder of the kind that large models are, with the last token's vector."""
    modules = [wide_decoder(directory), Pooling(64, "lasttoken"), Normalize()]
    return SentenceTransformer(modules=modules, device="cpu")


def dense_headed(directory: Path) -> SentenceTransformer:
    """BERT with a dense layer after the pooling."""
    modules = [bert(directory), Pooling(DIMENSIONS, "mean"), Dense(DIMENSIONS, 12)]
    return SentenceTransformer(modules=modules, device="cpu")


def prompted(directory: Path) -> SentenceTransformer:
    """BERT that leaves the prompt out of its mean, and has a default prompt."""
    return SentenceTransformer(
        modules=[bert(directory), Pooling(DIMENSIONS, "mean", include_prompt=False)],
        prompts={"query": "Query: ", "passage": "Passage, as it is: ", "topic": "Topic: "},
        default_prompt_name="query",
        device="cpu",
    )


def routed(directory: Path) -> SentenceTransformer:
    """Two models in one, for queries and for documents, and one head for both."""
    directory.mkdir()
    router = Router.for_query_document(
        query_modules=[bert(directory / "query"), Pooling(DIMENSIONS, "cls")],
        document_modules=[bert(directory / "document"), Pooling(DIMENSIONS, "mean")],
    )
    return SentenceTransformer(modules=[router, Normalize()], device="cpu")


def static(directory: Path) -> SentenceTransformer:
    """Averaged word vectors: no transformer at all."""
    del directory
    return SentenceTransformer(
        modules=[StaticEmbedding(word_pieces(), embedding_dim=DIMENSIONS)], device="cpu"
    )


def bag_of_words(directory: Path) -> SentenceTransformer:
    """Counts of the words in a list."""
    del directory
    words = sorted({word.strip(".,:?").lower() for text in SENTENCES for word in text.split()})
    return SentenceTransformer(modules=[BoW(vocab=words)], device="cpu")


KINDS: Final[dict[str, Callable[[Path], SentenceTransformer]]] = {
    each.__name__: each
    for each in (
        mean_pooled, cls_pooled, last_token_pooled, roberta_pooled, windowed, dense_headed,
        prompted, routed, static, bag_of_words,
    )
}  # fmt: skip


OTHERS: Final = {"shared": shared}  # to the engines it is another `last_token_pooled`


def build(kind: str, directory: Path, seed: int = 0) -> Path:
    """Write the files of a random model; the same kind and seed make the same model."""
    torch.manual_seed(len(kind) + 100 * seed)
    model = (KINDS | OTHERS)[kind](directory / "transformer")
    model.save(str(directory / "model"), create_model_card=False)
    return directory / "model"
