"""fastembed on ONNX Runtime, with the same weights exported to ONNX."""

import hashlib
import json
import multiprocessing
import shutil
import sys
from pathlib import Path

import numpy as np
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType

from benchmarks.peers.protocol import Embed, Task, measure

NAME = "benchmark/model"


def export(model: Path, directory: Path) -> None:
    """Write the transformer of a sentence-transformers model as ONNX, with its tokenizer."""
    import torch  # noqa: PLC0415 # only here: it must not count as memory of fastembed
    from transformers import AutoModel, AutoTokenizer  # noqa: PLC0415 # the same

    tokens = AutoTokenizer.from_pretrained(model)(["a text", "another one"], return_tensors="pt")
    names = ["input_ids", "attention_mask", "token_type_ids"]  # as the model takes them
    axes = {name: {0: "batch", 1: "sequence"} for name in names}
    temporary = directory.with_suffix(".part")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(model, temporary, ignore=shutil.ignore_patterns("*.safetensors"))
    torch.onnx.export(
        AutoModel.from_pretrained(model, attn_implementation="eager").eval(),
        tuple(tokens[name] for name in names),
        str(temporary / "model.onnx"),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_axes=axes,
        dynamo=False,
    )
    # The model keeps fewer tokens than its tokenizer would; fastembed knows only the tokenizer.
    path = temporary / "tokenizer_config.json"
    limit = json.loads((model / "sentence_bert_config.json").read_text())["max_seq_length"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": limit}))
    temporary.rename(directory)


def load(task: Task) -> Embed:
    """Load the model with mean pooling and normalisation; it is exported at the first call."""
    if task.device != "cpu":
        sys.exit("the package for GPUs is another one")
    digest = hashlib.sha256(str(task.model).encode()).hexdigest()
    directory = task.out.parent / f"onnx-{digest[:16]}"
    if not directory.exists():
        process = multiprocessing.get_context("spawn").Process(
            target=export, args=(task.model, directory)
        )
        process.start()
        process.join()
        if process.exitcode:
            sys.exit("torch did not export the model to ONNX")
    TextEmbedding.add_custom_model(
        model=NAME,
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(hf=NAME),
        dim=json.loads((task.model / "config.json").read_text())["hidden_size"],
        model_file="model.onnx",
    )
    model = TextEmbedding(NAME, specific_model_path=str(directory))
    return lambda texts: np.stack(list(model.embed(texts)))


if __name__ == "__main__":
    measure(load, "fastembed")
