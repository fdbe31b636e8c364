"""LlamaIndex by the protocol of Text Embeddings Inference."""

import json
import sys

from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference

url, key, model = sys.argv[1:]
client = TextEmbeddingsInference(model_name=model, base_url=url, auth_token=key)
json.dump(client.get_text_embedding_batch(json.load(sys.stdin)), sys.stdout)
