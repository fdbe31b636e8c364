"""LlamaIndex by OpenAI's protocol."""

import json
import sys

from llama_index.embeddings.openai_like import OpenAILikeEmbedding

url, key, model = sys.argv[1:]
client = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key=key)
json.dump(client.get_text_embedding_batch(json.load(sys.stdin)), sys.stdout)
